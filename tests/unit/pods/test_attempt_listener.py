"""What an attempt leaves for the probes, and for whoever asks where it failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_trainer.errors import DeviceOutOfMemory, WorkerLost
from rljob_trainer.pods.attempt_listener import AttemptListener
from rljob_trainer.step_report.reporter import NoReportStore, StepReporter
from tests.unit.ledger.samples import step_record
from tests.unit.trainer.test_role_settings import PLAN


@pytest.fixture
def listener(tmp_path: Path) -> AttemptListener:
    return AttemptListener(StepReporter(NoReportStore(), "digits", 2), 2, tmp_path / "ready")


def test_a_pod_is_ready_when_the_roles_work_on_a_step_and_not_before(listener: AttemptListener, tmp_path: Path) -> None:
    listener.attempt_began(PLAN, [], lambda _text: None)
    assert not (tmp_path / "ready").exists()
    listener.phase_began(1, "rollout")
    assert (tmp_path / "ready").exists()


def test_evidence_has_the_step_and_phase_that_the_loop_was_in(listener: AttemptListener) -> None:
    listener.attempt_began(PLAN, [step_record(1)], lambda _text: None)
    listener.phase_began(2, "rollout")
    listener.phase_began(2, "update")
    evidence = listener.evidence_of(DeviceOutOfMemory("CUDA out of memory").of("policy-1"))
    assert evidence is not None
    assert (evidence.attempt, evidence.step, evidence.phase, evidence.rank) == (2, 2, "update", 1)


def test_a_failure_while_the_roles_start_is_of_the_step_that_comes_next(listener: AttemptListener) -> None:
    listener.attempt_began(PLAN, [step_record(1), step_record(2)], lambda _text: None)
    evidence = listener.evidence_of(DeviceOutOfMemory("CUDA out of memory").of("rollout-0"))
    assert evidence is not None
    assert (evidence.step, evidence.phase) == (3, None)


def test_a_lost_worker_is_no_evidence(listener: AttemptListener) -> None:
    assert listener.evidence_of(WorkerLost("policy-0 died").of("policy-0")) is None
