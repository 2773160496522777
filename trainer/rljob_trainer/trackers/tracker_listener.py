"""Reports a run to one tracker. What it has reported is remembered, so that a later attempt appends the rest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rljob_api.job import RLJob
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import Phase, PlanChange
from rljob_api.step_report import Evidence
from rljob_api.tracking import TrackerSpec
from rljob_client.run_directory.records import EvaluationRecord, LedgerRecord, StepRecord
from rljob_client.run_directory.samples import Sample
from rljob_client.run_directory.summary import Summary
from rljob_memory.recovery import messages
from rljob_memory.sample import MemorySample
from rljob_trainer.run_listener import RunListener
from rljob_trainer.trackers.delivery import Delivery
from rljob_trainer.trackers.registry import tracker_class
from rljob_trainer.trackers.tracker import TrackedRun, Tracker
from rljob_trainer.trackers.values import record_values, run_config, summary_values

Reported = StepRecord | EvaluationRecord


class TrackerListener(RunListener):
    """Passes the records of a run to the thread of its tracker."""

    def __init__(
        self,
        spec: TrackerSpec,
        job: RLJob,
        directory: Path,
        records: Sequence[LedgerRecord],
        warn: Callable[[str], None],
    ) -> None:
        """`directory`: output directory. `records`: the ledger's; those that no attempt has reported are reported
        first. `warn`: displays a warning, from any thread."""
        self._state = directory / ".trackers" / f"{spec.name}.json"
        self._spec, self._job, self._directory = spec, job, directory
        self._known = [record for record in records if isinstance(record, StepRecord | EvaluationRecord)]
        self._count = len(self._known)
        self._step = self._known[-1].step if self._known else 0
        self._delivery = Delivery(spec.name, self._open, warn, os.environ)

    # --- calls of the loop ---

    def step_committed(self, record: StepRecord, memory: Mapping[str, Mapping[Phase, MemorySample]]) -> None:
        self._report(record)

    def evaluated(self, record: EvaluationRecord) -> None:
        self._report(record)

    def samples(self, samples: Sequence[Sample]) -> None:
        """Report samples of one kind and step."""
        self._delivery.put(lambda tracker: tracker.samples(samples, samples[0].step))

    def failed(self, evidence: Evidence) -> None:
        cause = evidence.diagnoses[0] if evidence.diagnoses else None
        place = evidence.role, evidence.rank, evidence.phase, evidence.step
        text = evidence.message if cause is None else messages.out_of_memory_message(*place, cause)
        self._note("OutOfMemory" if cause is None else cause.class_name, text)

    def plan_changed(self, change: PlanChange, plan: MemoryPlan) -> None:
        self._note("PlanChanged", messages.changed_message(change))

    def recovered(self, change: PlanChange) -> None:
        self._note("Recovered", messages.recovered_message(change))

    def finished(self, summary: Summary) -> None:
        self._delivery.put(lambda tracker: tracker.finish(summary.status, summary_values(summary)))

    def close(self, deadline: float) -> None:
        """Wait for the tracker, until `deadline` on the monotonic clock at most."""
        self._delivery.close(deadline)

    def _note(self, title: str, text: str) -> None:
        step = self._step
        self._delivery.put(lambda tracker: tracker.note(title, text, step))

    def _report(self, record: Reported) -> None:
        self._count, self._step = self._count + 1, record.step
        count = self._count
        self._delivery.put(lambda tracker: self._log(tracker, record, count))

    # --- in the thread ---

    def _open(self) -> Tracker:
        before = self._remembered()
        reported = before.get("records", 0)
        rest = self._known[reported:]
        steps = (record.step for record in rest if isinstance(record, StepRecord))
        next_step = next(steps, self._step + 1)  # an evaluation of an earlier step may be reported before
        run_id = before.get("run_id")
        run = TrackedRun(self._spec, self._job.metadata.name, run_config(self._job), self._directory, run_id, next_step)
        tracker = tracker_class(self._spec.name)(run)
        if tracker.run_id != run_id:  # the earlier one was deleted
            reported = 0
        self._remember(tracker, reported)
        for count, record in enumerate(self._known[reported:], start=reported + 1):
            self._log(tracker, record, count)
        return tracker

    def _log(self, tracker: Tracker, record: Reported, count: int) -> None:
        time = record.committed_at if isinstance(record, StepRecord) else record.evaluated_at
        tracker.log(record_values(record), record.step, time)
        self._remember(tracker, count)

    def _remembered(self) -> dict[str, Any]:
        """State of an earlier attempt. Empty if there is none, or if the run is now in another project."""
        with suppress(OSError, ValueError):
            state = json.loads(self._state.read_bytes())
            if isinstance(state, dict) and state.get("project") == self._spec.project:
                return state
        return {}

    def _remember(self, tracker: Tracker, count: int) -> None:
        self._state.parent.mkdir(exist_ok=True)
        state = {"run_id": tracker.run_id, "project": self._spec.project, "records": count}
        partial = self._state.with_name(f"{self._state.name}.partial")
        partial.write_bytes(json.dumps(state).encode())
        partial.replace(self._state)
