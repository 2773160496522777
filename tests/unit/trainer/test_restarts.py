"""Failures of an attempt after which `rljob run` restarts."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_settings import MemorySettings
from rljob_api.recovery import RecoverySpec
from rljob_client.errors import BadInput, OutputUnavailable, RunError
from rljob_client.run_directory.ledger import Ledger
from rljob_memory.recovery import Constraints, RecoveryState, Response, Restart, respond
from rljob_trainer.errors import DeviceOutOfMemory, WorkerLost
from rljob_trainer.recovery.recovery import failure_report
from rljob_trainer.runtime.job_run import JobRun, Outcome
from rljob_trainer.runtime.run_command import RunOptions, run_manifest
from rljob_trainer.runtime.supervision import Supervision
from tests.unit.ledger.samples import step_record

LOST = WorkerLost("policy-0 died while updating").of("policy-0")
RAISED = RunError("policy-0 failed while updating: ValueError: no").of("policy-0")
MANIFEST = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: short}
spec:
  model: {uri: "file:///model"}
  task: {name: digits}
  algorithm: {steps: 8}
  recovery: {maxRestarts: 1}
"""
ON_ITS_OWN = Constraints(MemorySettings(), RecoverySpec(max_restarts=1), None, Supervision().levels)


def answer(failure: RunError, state: RecoveryState) -> Response:
    return respond(failure_report(failure, 1, datetime(2026, 1, 1, tzinfo=UTC)), state, ON_ITS_OWN)


def given_up(failure: RunError) -> RunError:
    failure.given_up = True
    return failure


def test_half_of_the_remaining_steps_give_a_restart_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of 8 steps never commits the 10 steps that restore a restart in a longer job."""
    commits = iter([4, 2, 1, 1])

    def attempt(_run: JobRun, ledger: Ledger, _display: object, _stop: object) -> Outcome:
        for _ in range(next(commits)):
            ledger.commit(step_record(ledger.next_step))
        if ledger.last_step < 8:
            raise WorkerLost("policy-0 died while updating").of("policy-0")
        return Outcome(ExitCode.COMPLETE, "complete", ledger.last_step)

    monkeypatch.setattr(JobRun, "_attempt", attempt)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run")) is ExitCode.COMPLETE


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (RAISED, "the previous attempt failed with the same error"),
        (LOST, "all restarts are used, recovery.maxRestarts is 2"),
    ],
)
def test_a_run_that_is_given_up_reports_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: RunError, why: str
) -> None:
    def attempt(*_: object) -> Outcome:
        raise failure

    monkeypatch.setattr(JobRun, "_attempt", attempt)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST.replace("maxRestarts: 1", "maxRestarts: 2"))
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run")) is failure.exit_code
    reason = json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"]
    assert str(failure) in reason
    assert why in reason


def test_a_failure_after_the_last_step_names_the_missing_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(_run: JobRun, ledger: Ledger, *_: object) -> Outcome:
        for _step in range(8):
            ledger.commit(step_record(ledger.next_step))
        raise OutputUnavailable("the disk is full")

    monkeypatch.setattr(JobRun, "_attempt", attempt)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run")) is ExitCode.OUTPUT_UNAVAILABLE
    reason = json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"]
    assert reason.startswith("the disk is full. To write the model, run the same command again.")


@pytest.mark.parametrize("failure", [LOST, RunError("policy-0 failed while updating: ValueError: no").of("policy-0")])
def test_a_process_that_died_or_raised_is_restarted(failure: RunError) -> None:
    assert isinstance(answer(failure, RecoveryState(None, 100)), Restart)


@pytest.mark.parametrize(
    "failure",
    [
        BadInput("no such model").of("policy-0"),
        OutputUnavailable("the disk is full"),
        given_up(DeviceOutOfMemory("CUDA out of memory").of("policy-0")),
        RunError("Ray did not start"),
    ],
)
def test_a_failure_that_would_recur_is_not_restarted(failure: RunError) -> None:
    assert not isinstance(answer(failure, RecoveryState(None, 100)), Restart)
