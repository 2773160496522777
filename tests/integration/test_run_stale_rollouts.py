"""Rollouts of earlier weights with real engines: stale steps, and partial rollouts that continue with newer weights."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml

from rljob_testing.runs import FinishedRun
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.rollout_batch import RolloutBatch
from tests.integration.compared_runs import (
    LARGE_MODEL,
    ROOMY_PLAN,
    assert_same_end,
    assert_same_ledger,
    completed_run,
    disaggregated_manifest,
    injected,
    stop_after,
)
from tests.integration.policy_processes import policy_config, policy_processes, token_logprobs

STEPS = 6
STALE_JOB: dict[str, dict[str, Any]] = {
    "model": {"uri": LARGE_MODEL},
    "algorithm": {"steps": STEPS, "promptsPerStep": 4, "groupSize": 4, "maxStaleness": 1, "learningRate": 1.0e-3},
    "rollout": {"replicas": 2, "gpusPerReplica": 0},
    "policy": {"gpusPerReplica": 0},
    "memory": {"microBatchTokens": 192},
    "recovery": {"maxAdjustments": 20},
    "faultInjection": {"enabled": True},
}
FAULTS = [
    # The engine's first, as long as its KV cache can shrink.
    "KVCacheOversized@load:1",
    "KVCacheOversized@rollout:2",
    "WeightSyncSpike@sync:3",
    "ActivationSpike@checkpoint:4",
    "OptimizerState@optimizer:5",
    "WorkerLost@update:6",
]


def journal(output: Path) -> list[RolloutBatch]:
    return [RolloutBatch.load(path) for path in sorted((output / "journal").glob("step-*.npz"))]


def stale_run(directory: Path, checkpoint: dict[str, int], *faults: str) -> FinishedRun:
    directory.mkdir()
    manifest = disaggregated_manifest(directory / "job.yaml", **STALE_JOB, checkpoint=checkpoint)
    (directory / "plan.json").write_text(json.dumps(ROOMY_PLAN))
    options = (f"--fault={fault}" for fault in faults)
    return completed_run(manifest, directory / "run", "--plan", directory / "plan.json", *options)


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return stale_run(tmp_path_factory.mktemp("stale") / "whole", KEPT)


def test_each_step_is_generated_with_the_weights_of_two_steps_before(stale: FinishedRun, tmp_path: Path) -> None:
    versions = [batch.weights_version for batch in journal(stale.output)]
    assert versions == [max(step - 2, 0) for step in range(1, STEPS + 1)]
    assert_recorded_weights_generated_every_token(recomputed(stale.output, tmp_path))


@pytest.mark.long
def test_failures_in_every_phase_change_no_bit(stale: FinishedRun, tmp_path: Path) -> None:
    failed = stale_run(tmp_path / "failed", {"everySteps": 2}, *FAULTS)
    assert len(injected(failed)) == len(FAULTS)
    assert_same_end(failed, stale)
    assert_same_ledger(failed, stale)


# --- partial rollouts ---

PROMPTS, GROUP_SIZE, PARTIAL = 4, 2, 2
PARTIAL_JOB: dict[str, dict[str, Any]] = {
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


def partial_manifest(directory: Path, checkpoint: dict[str, int]) -> Path:
    return disaggregated_manifest(directory / "job.yaml", **PARTIAL_JOB, checkpoint=checkpoint)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    directory = tmp_path_factory.mktemp("uninterrupted")
    return completed_run(partial_manifest(directory, KEPT), directory / "run")


def test_unfinished_responses_continue_and_are_counted(uninterrupted: FinishedRun) -> None:
    responses = [step["metrics"]["continued_responses"] for step in uninterrupted.steps]
    tokens = [step["metrics"]["continued_tokens"] for step in uninterrupted.steps]
    assert responses[:2] == [0, 0], "the first two steps are generated with the initial weights"
    assert sum(responses) > 0
    assert all(0 <= count <= PARTIAL * GROUP_SIZE for count in responses)
    assert [count > 0 for count in tokens] == [count > 0 for count in responses]
    # Engine and policy compute the same log-probability of a token if the policy has the weights that generated it.
    assert uninterrupted.steps[0]["metrics"]["logprob_diff_mean"] < 1e-4


def test_each_token_has_the_log_probability_of_its_weights(uninterrupted: FinishedRun, tmp_path: Path) -> None:
    steps = recomputed(uninterrupted.output, tmp_path)
    assert any(len(set(step.versions)) > 1 for step in steps), "no response continued with other weights"
    assert_recorded_weights_generated_every_token(steps)


def test_an_interrupted_run_ends_with_the_same_bits(uninterrupted: FinishedRun, tmp_path: Path) -> None:
    output, manifest = tmp_path / "run", partial_manifest(tmp_path, {"everySteps": 4})
    # The next step does not end before the run is stopped.
    code, _ = stop_after(3, "controller", signal.SIGKILL, manifest, output, "--fault=Hang@update:4")
    assert code == -signal.SIGKILL
    batches = journal(output)
    assert batches[-1].step >= 4, "the rollouts of the next step are in the journal before a step is committed"
    assert all(len(batch.left) == PARTIAL for batch in batches if batch.step < STEPS)

    finished = completed_run(manifest, output)
    assert len(finished.attempts) == 2
    assert_same_end(finished, uninterrupted)
    counts = ("continued_responses", "continued_tokens")
    for step, expected in zip(finished.steps, uninterrupted.steps, strict=True):
        assert [step["metrics"][name] for name in counts] == [expected["metrics"][name] for name in counts]


KEPT = {"everySteps": 1, "keep": 100}
"""`checkpoint` of a job whose run keeps the weights after every step, and all of its journal."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The tokens of one step. All arrays are parallel: one entry per response token."""

    step: int
    versions: npt.NDArray[Any]
    """The step whose weights generated the token, according to the journal."""
    differences: npt.NDArray[Any]
    """[version, token] Distance of the log-probability in the journal from that of the policy at each version."""

    @property
    def at_recorded(self) -> npt.NDArray[Any]:
        differences: npt.NDArray[Any] = self.differences[self.versions, np.arange(len(self.versions))]
        return differences

    def at_recorded_plus(self, steps: int) -> npt.NDArray[Any]:
        """The same at weights that are `steps` newer, of the tokens for which there are such weights."""
        versions = self.versions + steps
        exist = (versions >= 0) & (versions < len(self.differences))
        differences: npt.NDArray[Any] = self.differences[versions[exist], np.arange(len(self.versions))[exist]]
        return differences


def recomputed(output: Path, temporary: Path) -> list[Recomputed]:
    """Each step of the journal of a run with `KEPT` checkpoints, on one rank on the CPU."""
    spec = yaml.safe_load((output / "job.yaml").read_text())["spec"]
    batches = [RolloutBatch.load(path) for path in sorted((output / "journal").glob("step-*.npz"))]
    config = policy_config(
        resolve_model(spec["model"]["uri"]), temporary, temperature=spec["algorithm"].get("temperature", 1.0)
    )
    by_version: list[list[npt.NDArray[Any]]] = []
    with policy_processes(1, config) as policy:
        for checkpoint in _weights(output):
            if checkpoint is not None:
                policy.call("load_checkpoint", checkpoint)
            by_version.append([np.concatenate(policy.run(token_logprobs, batch)[0]) for batch in batches])
    return [
        Recomputed(
            step=batch.step,
            versions=_versions(batch),
            differences=np.stack([np.abs(of[place] - np.concatenate(batch.rollout_logprobs)) for of in by_version]),
        )
        for place, batch in enumerate(batches)
    ]


def _weights(output: Path) -> Iterator[Path | None]:
    """Checkpoint of each version, from 0: the initial weights."""
    yield None
    checkpoints = sorted((output / "checkpoints").glob("step-??????"))
    assert [int(path.name[-6:]) for path in checkpoints] == list(range(1, len(checkpoints) + 1))
    yield from checkpoints


def _versions(batch: RolloutBatch) -> npt.NDArray[Any]:
    if batch.token_versions:
        return np.concatenate(batch.token_versions)
    assert batch.weights_version is not None
    return np.full(batch.response_tokens, batch.weights_version)


def assert_recorded_weights_generated_every_token(steps: list[Recomputed], tolerance: float = 1e-4) -> None:
    """The journal's log-probabilities are those of the recorded weights, and of no neighbouring ones."""
    for step in steps:
        assert step.at_recorded.max() < tolerance, f"step {step.step}"
    learned = [step for step in steps if step.step >= 3]
    assert learned
    for step in learned:
        for off in (1, -1):
            assert np.median(step.at_recorded_plus(off)) > 10 * tolerance, f"step {step.step}, version {off:+d}"
