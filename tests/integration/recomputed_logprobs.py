"""The log-probabilities in a run's journal, compared with those of the policy at each version of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.rollout_batch import RolloutBatch
from tests.integration.policy_processes import policy_config, policy_processes

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
            by_version.append([np.concatenate(policy.call("token_logprobs", batch)[0]) for batch in batches])
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
