"""Partial rollouts with real engines: responses continue with the next weights, and an interruption changes no bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.exit_codes import ExitCode
from rljob_testing.runs import Run, rljob_run, write_manifest
from rljob_trainer.rollout_batch import RolloutBatch
from tests.integration.recomputed_logprobs import (
    KEPT,
    assert_recorded_weights_generated_every_token,
    recomputed,
)
from tests.integration.stopped_runs import assert_same_end, stop_after

STEPS = 6
PROMPTS, GROUP_SIZE, PARTIAL = 4, 2, 2
JOB: dict[str, dict[str, Any]] = {
    "algorithm": {
        "steps": STEPS,
        "promptsPerStep": PROMPTS,
        "groupSize": GROUP_SIZE,
        "maxStaleness": 1,
        "partialRolloutPrompts": PARTIAL,
        "maxResponseTokens": 96,
        "ignoreEndOfSequence": False,
    },
    "faultInjection": {"enabled": True},
}


def manifest_in(directory: Path, checkpoint: dict[str, int]) -> Path:
    path = write_manifest(directory / "job.yaml", **JOB, checkpoint=checkpoint)
    job = yaml.safe_load(path.read_text())
    job["spec"]["topology"] = "Disaggregated"
    path.write_text(yaml.safe_dump(job))
    return path


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("uninterrupted")
    run = rljob_run(manifest_in(directory, KEPT), directory / "run")
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    return run


def test_unfinished_responses_continue_and_are_counted(uninterrupted: Run) -> None:
    responses = [step["metrics"]["continued_responses"] for step in uninterrupted.steps]
    tokens = [step["metrics"]["continued_tokens"] for step in uninterrupted.steps]
    assert responses[:2] == [0, 0], "the first two steps are generated with the initial weights"
    assert sum(responses) > 0
    assert all(0 <= count <= PARTIAL * GROUP_SIZE for count in responses)
    assert [count > 0 for count in tokens] == [count > 0 for count in responses]
    # Engine and policy compute the same log-probability of a token if the policy has the weights that generated it.
    assert uninterrupted.steps[0]["metrics"]["logprob_diff_mean"] < 1e-4


def test_each_token_has_the_log_probability_of_its_weights(uninterrupted: Run, tmp_path: Path) -> None:
    steps = recomputed(uninterrupted.output, tmp_path)
    assert any(len(set(step.versions)) > 1 for step in steps), "no response continued with other weights"
    assert_recorded_weights_generated_every_token(steps)


def test_an_interrupted_run_ends_with_the_same_bits(uninterrupted: Run, tmp_path: Path) -> None:
    output, manifest = tmp_path / "run", manifest_in(tmp_path, {"everySteps": 4})
    # The next step does not end before the run is stopped.
    code, _ = stop_after(3, "controller", signal.SIGKILL, manifest, output, "--fault=Hang@update:4")
    assert code == -signal.SIGKILL
    batches = [RolloutBatch.load(path) for path in sorted((output / "journal").glob("step-*.npz"))]
    assert batches[-1].step >= 4, "the rollouts of the next step are in the journal before a step is committed"
    assert all(len(batch.left) == PARTIAL for batch in batches if batch.step < STEPS)

    finished = rljob_run(manifest, output)

    assert finished.exit_code == ExitCode.COMPLETE, finished.printed
    assert len(finished.attempts) == 2
    assert_same_end(finished, uninterrupted)
    counts = ("continued_responses", "continued_tokens")
    for step, expected in zip(finished.steps, uninterrupted.steps, strict=True):
        assert [step["metrics"][name] for name in counts] == [expected["metrics"][name] for name in counts]
