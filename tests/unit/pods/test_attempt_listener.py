"""Readiness of a pod during an attempt."""

from __future__ import annotations

from pathlib import Path

from rljob_testing.memory_plans import memory_plan
from rljob_trainer.pods.controller_pod import AttemptListener
from rljob_trainer.step_report.reporter import NoReportStore

PLAN = memory_plan()


def test_a_pod_is_ready_when_the_roles_work_on_a_step_and_not_before(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    listener = AttemptListener(NoReportStore(), 2, ready)
    listener.attempt_began(PLAN, [], lambda _text: None)
    assert not ready.exists()
    listener.phase_began(1, "sync")
    assert ready.exists()
    listener.close(1)
