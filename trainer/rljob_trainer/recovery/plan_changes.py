"""The recovery state of a run: the current memory plan and its changes, each recorded before it takes effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_api.step_report import Evidence
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.records import AttemptRecord, PlanChangeRecord, plan_change_records
from rljob_memory.recovery import Changed, RecoveryState, Restart
from rljob_memory.recovery.other_machine import PlanFacts


def state_at_start(
    ledger: Ledger,
    steps: int,
    plan: MemoryPlan | None = None,
    changes: Sequence[PlanChange] = (),
    *,
    supervised: bool = True,
) -> RecoveryState:
    """The state at the start of an attempt of a job with `steps` steps. Its plan is None before the first attempt.

    `plan`, `changes`: from the supervisor. `supervised`: it decides the settings of pods, the policy's size among them.
    """
    records = plan_change_records(ledger.records)
    known, supervisors = plan.generation if plan else 0, {change.generation: change for change in changes}
    # A supervisor keeps only the latest changes.
    older = {record.change.generation: record.change for record in records if record.change.generation <= known}
    begun_with = [change for _, change in sorted((older | supervisors).items())]
    state = RecoveryState.replayed(plan, begun_with, committed_step=ledger.last_step, steps=steps)
    newest = records[-1].plan if records else None
    merged = state.merge(newest, [record.change for record in records], decides_pods=supervised)
    return replace(merged, first_step=ledger.next_step)


def facts_of_plan(ledger: Ledger, plan: MemoryPlan) -> PlanFacts:
    """The facts that `plan`, of `state_at_start`, was computed for; empty if they are unknown.

    A plan from the ledger is of the attempt that made its last change; any other is of the last attempt.
    """
    facts: PlanFacts = {}
    of_generation: dict[int, PlanFacts] = {}
    for record in ledger.records:
        if isinstance(record, AttemptRecord):
            facts = record.plan_facts
        elif isinstance(record, PlanChangeRecord):
            of_generation.setdefault(record.plan.generation, facts)
    return of_generation.get(plan.generation, facts)


class PlanChanges:
    """The changes of the plan in one attempt."""

    def __init__(self, ledger: Ledger, state: RecoveryState) -> None:
        """`state`: at the start of the attempt, with a plan."""
        self._ledger = ledger
        self._state = state
        self._records = plan_change_records(ledger.records)

    @property
    def state(self) -> RecoveryState:
        return replace(self._state, committed_step=self._ledger.last_step)

    @property
    def plan(self) -> MemoryPlan:
        """The current memory plan."""
        assert self._state.plan is not None, "an attempt has a plan"
        return self._state.plan

    @property
    def own(self) -> list[PlanChange]:
        """Changes that the trainer made, in this attempt and earlier ones, oldest first."""
        return [record.change for record in self._records]

    @property
    def unconfirmed(self) -> PlanChangeRecord | None:
        """The latest change, until the failed phase has succeeded."""
        latest = self._records[-1] if self._records else None
        if latest is None or latest.change.preventive or latest.change.seconds_to_recover is not None:
            return None
        # If the supervisor has changed the plan since, the effect is that of its change.
        return latest if latest.change.generation == self._state.changes[-1].generation else None

    def adopt(self, answer: Changed, evidence: Evidence | None) -> None:
        """Record the change. Its plan is then current, even if this process exits at once."""
        record = PlanChangeRecord(change=answer.change, plan=answer.plan, evidence=evidence)
        self._ledger.record(record)
        self._records.append(record)
        self._state = answer.state

    def adopt_replacement(self, answer: Restart) -> None:
        """Count the replacement of a process. It leaves the plan as it is."""
        self._state = answer.state

    def confirm(self, change: PlanChange, seconds: Mapping[str, float]) -> None:
        """Record the effect of the latest change. `seconds`: duration of each part of the recovery."""
        record = self._records[-1].model_copy(update={"change": change, "seconds": dict(seconds)})
        self._ledger.record(record)
        self._records[-1] = record
        self._state = self._state.with_effect(change)
