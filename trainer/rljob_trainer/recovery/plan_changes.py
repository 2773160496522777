"""The recovery state of a run: the plan in force, and every change of it, written down before anything acts on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_api.step_report import Evidence
from rljob_memory.recovery import Changed, RecoveryState
from rljob_trainer.ledger.ledger import Ledger
from rljob_trainer.ledger.records import PlanChangeRecord, plan_change_records


def state_at_start(
    ledger: Ledger, steps: int, plan: MemoryPlan | None = None, changes: Sequence[PlanChange] = ()
) -> RecoveryState:
    """The state that an attempt begins with, of a job of `steps` steps. Its plan is None if nobody has one yet.

    `plan`, `changes`: those of the supervisor.
    """
    records = plan_change_records(ledger.records)
    known, supervisors = plan.generation if plan else 0, {change.generation: change for change in changes}
    # A supervisor keeps only the latest changes.
    older = {record.change.generation: record.change for record in records if record.change.generation <= known}
    begun_with = [change for _, change in sorted((older | supervisors).items())]
    state = RecoveryState.replayed(plan, begun_with, committed_step=ledger.last_step, steps=steps)
    newest = records[-1].plan if records else None
    return state.merge(newest, [record.change for record in records])


class PlanChanges:
    """The changes of the plan in one attempt."""

    def __init__(self, ledger: Ledger, state: RecoveryState) -> None:
        """`state`: with the plan that the attempt begins with."""
        self._ledger = ledger
        self._state = state
        self._records = plan_change_records(ledger.records)

    @property
    def state(self) -> RecoveryState:
        return replace(self._state, committed_step=self._ledger.last_step)

    @property
    def plan(self) -> MemoryPlan:
        """The plan in force."""
        assert self._state.plan is not None, "an attempt has a plan"
        return self._state.plan

    @property
    def own(self) -> list[PlanChange]:
        """The changes that were made here, in this attempt and before, oldest first."""
        return [record.change for record in self._records]

    @property
    def unconfirmed(self) -> PlanChangeRecord | None:
        """The latest change, until the failed phase has succeeded."""
        latest = self._records[-1] if self._records else None
        if latest is None or latest.change.preventive or latest.change.seconds_to_recover is not None:
            return None
        # A later change of the supervisor's is the one that helped then.
        return latest if latest.change.generation == self._state.changes[-1].generation else None

    def adopt(self, answer: Changed, evidence: Evidence | None) -> None:
        """Write the change down. From then on its plan is in force, however this process ends."""
        record = PlanChangeRecord(change=answer.change, plan=answer.plan, evidence=evidence)
        self._ledger.record(record)
        self._records.append(record)
        self._state = answer.state

    def confirm(self, change: PlanChange, seconds: Mapping[str, float]) -> None:
        """Write down the effect of the latest change. `seconds`: of each part of the recovery."""
        record = self._records[-1].model_copy(update={"change": change, "seconds": dict(seconds)})
        self._ledger.record(record)
        self._records[-1] = record
        self._state = self._state.with_effect(change)
