"""Jobs whose updates begin while groups are generated, with real engines: which groups, and failures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rljob_testing.runs import FinishedRun, rljob_run
from rljob_trainer.rollout_batch import RolloutBatch
from rljob_trainer.runtime.streamed_update import VARIABLE
from tests.integration.compared_runs import (
    LARGE_MODEL,
    ROOMY_PLAN,
    assert_same_weights,
    disaggregated_manifest,
    injected,
)

STEPS, PROMPTS = 4, 8
JOB: dict[str, dict[str, Any]] = {
    "model": {"uri": LARGE_MODEL},
    "algorithm": {
        "steps": STEPS,
        "promptsPerStep": PROMPTS,
        "groupSize": 4,
        "learningRate": 1.0e-3,
        "maxResponseTokens": 32,
        "ignoreEndOfSequence": False,
    },
    # Two groups at a time, so that some are complete before others begin.
    "rollout": {"gpusPerReplica": 0, "maxConcurrentSequences": 8},
    "memory": {"microBatchTokens": 192},
    "faultInjection": {"enabled": True},
    "checkpoint": {"everySteps": 1, "keep": 100},
}


def run(directory: Path, output: Path, *faults: str) -> FinishedRun:
    directory.mkdir(exist_ok=True)
    manifest = disaggregated_manifest(directory / "job.yaml", **JOB, policy={"gpusPerReplica": 0})
    (directory / "plan.json").write_text(json.dumps(ROOMY_PLAN))
    options = (f"--fault={fault}" for fault in faults)
    finished = rljob_run(manifest, output, "--plan", directory / "plan.json", *options, **{VARIABLE: "1"})
    assert finished.exit_code == 0, finished.printed
    return finished


def replayed(run_before: FinishedRun, directory: Path) -> FinishedRun:
    """The run resumed without its checkpoints: all updates are replayed from the journal, each in one call."""
    output = directory / "replayed"
    shutil.copytree(run_before.output, output)
    shutil.rmtree(output / "model")
    for checkpoint in (output / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    return run(directory, output)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(("ActivationSpike@update:2", "WorkerLost@update:3"), id="failures"),  # steps 1 and 4 have none
        pytest.param((), id="undisturbed", marks=pytest.mark.long),
    ],
)
def test_a_streamed_job_ends_with_the_bits_of_its_journal(tmp_path: Path, faults: tuple[str, ...]) -> None:
    finished = run(tmp_path, tmp_path / "run", *faults)
    assert len(injected(finished)) == len(faults)
    assert len(finished.attempts) == 1
    streamed = [step["metrics"]["streamed_groups"] for step in finished.steps]
    assert all(0 < share < 1 for share in streamed)
    for step, share in zip(finished.steps, streamed, strict=True):
        batch = RolloutBatch.load(finished.output / "journal" / f"step-{step['step']:06d}.npz")
        assert (batch.parts < batch.parts.max()).mean() == share
        if faults and step["step"] in (2, 3):
            assert batch.parts.max() == 1, "the rank failed in the first part, and got no other"
        assert sum(step["seconds"].values()) <= step["total_seconds"], "phases do not overlap in the ledger"
    again = replayed(finished, tmp_path)
    restored = [line for line in again.ledger if line["kind"] == "restore"][-1]
    assert (restored["checkpoint_step"], restored["replayed_steps"]) == (0, STEPS)
    assert_same_weights(again, finished)
