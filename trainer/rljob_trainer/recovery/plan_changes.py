"""The memory plan in force, and every change of it, written down before anything acts on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_settings import MemorySettings
from rljob_api.plan_change import PlanChange
from rljob_api.step_report import Evidence
from rljob_memory.recovery import History, adjustments_left_standing, history_of, with_change
from rljob_memory.recovery.pins import with_pins
from rljob_trainer.ledger.ledger import Ledger
from rljob_trainer.ledger.records import LedgerRecord, PlanChangeRecord, plan_change_records


def plan_in_force(
    first: MemoryPlan,
    given: MemoryPlan | None,
    records: Sequence[LedgerRecord],
    settings: MemorySettings,
    *,
    shares_gpu: bool,
) -> MemoryPlan:
    """The plan that an attempt begins with: of those given and recorded the one of the higher generation, else `first`.

    `given`: the supervisor's. Settings that the user has pinned since have the pinned values.
    """
    recorded = [record.plan for record in plan_change_records(records)]
    known = [plan for plan in (given, *recorded) if plan is not None]
    if not known:
        return first
    return with_pins(max(known, key=lambda plan: plan.generation), settings, shares_gpu=shares_gpu)


class PlanChanges:
    """The plan in force and what led to it. `plan`: as it is now."""

    def __init__(self, ledger: Ledger, plan: MemoryPlan, steps: int, of_supervisor: Sequence[PlanChange] = ()) -> None:
        """`steps`: of the job. `of_supervisor`: changes that the ledger does not know, or knows as its own."""
        self.plan = plan
        self._ledger = ledger
        self._steps = steps
        self._records = plan_change_records(ledger.records)
        changes = {change.generation: change for change in of_supervisor}
        for record in self._records:
            known = changes.get(record.change.generation, record.change)
            # One of the supervisor's that came in between is what was acted on; of the same, the ledger knows more.
            if known.remedy.setting == record.change.remedy.setting:
                changes[record.change.generation] = record.change
        self._history = history_of(
            [changes[generation] for generation in sorted(changes)], committed_step=ledger.last_step, steps=steps
        )

    @property
    def own(self) -> list[PlanChange]:
        """The changes that were made here, in this attempt and before, oldest first."""
        return [record.change for record in self._records]

    @property
    def history(self) -> History:
        """All changes, and how many of them have counted."""
        return replace(self._history, committed_step=self._ledger.last_step)

    @property
    def standing(self) -> History:
        """What `decide` is told: with the adjustments that are left standing after progress gave some back."""
        history = self.history
        return replace(history, adjustments=adjustments_left_standing(history, self._steps))

    @property
    def unproven(self) -> PlanChangeRecord | None:
        """The latest change, while the phase that had failed is not done."""
        latest = self._records[-1] if self._records else None
        if latest is None or latest.change.preventive or latest.change.seconds_to_recover is not None:
            return None
        # A later change of the supervisor's is what helped then.
        return latest if latest.change.generation == self._history.changes[-1].generation else None

    def adopt(self, change: PlanChange, plan: MemoryPlan, evidence: Evidence | None) -> None:
        """Write the change down; from then on `plan` is in force, whatever ends this process."""
        record = PlanChangeRecord(change=change, plan=plan, evidence=evidence)
        self._ledger.record(record)
        self._records.append(record)
        self._history = with_change(self.history, change, self._steps)
        self.plan = plan

    def prove(self, change: PlanChange, seconds: Mapping[str, float]) -> None:
        """Write down what the latest change brought. `seconds`: of each part of the recovery."""
        record = self._records[-1].model_copy(update={"change": change, "seconds": dict(seconds)})
        self._ledger.record(record)
        self._records[-1] = record
        changes = [change if each.generation == change.generation else each for each in self._history.changes]
        self._history = replace(self._history, changes=tuple(changes))
