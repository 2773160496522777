"""Dynamic sampling with real engines: an interrupted run continues with the same prompts."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from rljob_testing.runs import FinishedRun, write_manifest
from tests.integration.compared_runs import (
    MORE_STEPS_THAN_NEEDED,
    assert_same_end,
    assert_same_ledger,
    committed_steps,
    completed_run,
    stop_after,
)

JOB: dict[str, dict[str, Any]] = {
    # Of two responses of four tokens, many groups have no digit at all.
    "algorithm": {
        "promptsPerStep": 4,
        "groupSize": 2,
        "dynamicSampling": {"maxRounds": 6},
        "overlongPenalty": {"bufferTokens": 2, "factor": 0.1},
        "ignoreEndOfSequence": False,
    },
    "checkpoint": {"everySteps": 3, "keep": 1},
}


def manifest_of(directory: Path, steps: int) -> Path:
    return write_manifest(directory / f"job-{steps}.yaml", **JOB | {"algorithm": JOB["algorithm"] | {"steps": steps}})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run that was killed, and then completed."""
    directory = tmp_path_factory.mktemp("stopped")
    endless, output = manifest_of(directory, MORE_STEPS_THAN_NEEDED), directory / "run"
    code, printed = stop_after(4, "controller", signal.SIGKILL, endless, output)  # after the checkpoint of step 3
    assert code == -signal.SIGKILL, printed
    return completed_run(manifest_of(directory, committed_steps(output) + 2), output)


def test_a_run_that_was_killed_has_the_bits_of_one_that_was_not(stopped: FinishedRun, tmp_path: Path) -> None:
    whole = completed_run(manifest_of(tmp_path, len(stopped.steps)), tmp_path / "run")
    assert len(stopped.attempts) == 2
    assert_same_end(stopped, whole)
    assert_same_ledger(stopped, whole)
    assert [step["prompts_drawn"] for step in stopped.steps] == [step["prompts_drawn"] for step in whole.steps]


def test_groups_without_a_signal_are_replaced(stopped: FinishedRun) -> None:
    metrics = [step["metrics"] for step in stopped.steps]
    assert sum(each["dropped_groups"] for each in metrics) > 0, "the test needs groups with equal rewards"
    assert any(each["sampling_rounds"] > 1 for each in metrics)
    drawn = 0
    for step, each in zip(stopped.steps, metrics, strict=True):
        assert each["uniform_groups"] <= each["missing_groups"] / 4
        assert step["prompts_drawn"] - drawn == 4 + each["dropped_groups"] <= each["sampled_groups"]
        assert -0.1001 < each["overlong_penalty"] <= 0
        drawn = step["prompts_drawn"]
    assert all(each["missing_groups"] == 0 or each["sampling_rounds"] == 6 for each in metrics)
