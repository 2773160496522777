"""Errors about files that are missing in pods name task.files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_trainer.pods.controller_pod import advice_about_files
from rljob_trainer.pods.environment import ControllerEnvironment
from rljob_trainer.runtime.job_run import Outcome
from tests.unit.pods.pod_variables import pod_variables


@pytest.mark.parametrize(
    ("code", "place", "task_dir", "advised"),
    [
        (ExitCode.BAD_INPUT, "/etc/rljob", "", True),
        (ExitCode.BAD_INPUT, "/data", "", False),
        (ExitCode.BAD_INPUT, "/etc/rljob", "/var/lib/rljob-task", False),
        (ExitCode.WORKER_LOST, "/etc/rljob", "", False),
    ],
)
def test_advice_is_given_only_where_it_helps(
    tmp_path: Path, code: ExitCode, place: str, task_dir: str, advised: bool
) -> None:
    variables = pod_variables(tmp_path, RLJOB_MANIFEST="/etc/rljob/job.yaml", RLJOB_TASK_DIR=task_dir)
    outcome = Outcome(code, f"cannot import rewards; expected rewards.py in {place} or an installed module", 0)
    advice = advice_about_files(outcome, ControllerEnvironment.read(variables))
    assert ("task.files" in advice) is advised
