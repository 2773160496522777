"""Follows an attempt for the pod it runs in: readiness, the StepReport, and where the loop was when it failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rljob_api.memory_plan import MemoryPlan
from rljob_api.step_report import Evidence, Phase
from rljob_trainer.errors import TrainerError
from rljob_trainer.ledger.records import StepRecord
from rljob_trainer.run_listener import RunListener
from rljob_trainer.step_report.content import evidence_of
from rljob_trainer.step_report.reporter import StepReporter
from rljob_trainer.telemetry.memory import MemorySample


class AttemptListener(RunListener):
    def __init__(self, reporter: StepReporter, attempt: int, ready_file: Path) -> None:
        """`ready_file` appears when the roles are up and work on a step."""
        self._reporter = reporter
        self._attempt = attempt
        self._ready_file = ready_file
        self._step = 1
        self._phase: Phase | None = None

    def attempt_began(self, plan: MemoryPlan, committed: Sequence[StepRecord], warn: Callable[[str], None]) -> None:
        self._step = len(committed) + 1
        self._reporter.attempt_began(plan, committed, warn)

    def phase_began(self, step: int, phase: Phase) -> None:
        if self._phase is None:
            self._ready_file.touch()
        self._step, self._phase = step, phase
        self._reporter.phase_began(step, phase)

    def step_committed(self, record: StepRecord, memory: Mapping[str, Mapping[Phase, MemorySample]]) -> None:
        self._reporter.step_committed(record, memory)

    def evidence_of(self, error: TrainerError | None) -> Evidence | None:
        """What is known of an out-of-memory failure that ended the attempt."""
        return evidence_of(error, attempt=self._attempt, step=self._step, phase=self._phase, time=datetime.now(UTC))
