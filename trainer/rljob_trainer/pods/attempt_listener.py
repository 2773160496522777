"""Follows an attempt for the pod it runs in: the StepReport, and readiness."""

from __future__ import annotations

from pathlib import Path

from rljob_api.plan_change import Phase
from rljob_trainer.step_report.reporter import ReportStore, StepReporter


class AttemptListener(StepReporter):
    """Reports, and says to the pod's probes when the roles are up."""

    def __init__(self, store: ReportStore, job: str, attempt: int, ready_file: Path) -> None:
        """`ready_file` appears when the roles are up and work on a step."""
        super().__init__(store, job, attempt)
        self._ready_file = ready_file

    def phase_began(self, step: int, phase: Phase) -> None:
        self._ready_file.touch()
        super().phase_began(step, phase)
