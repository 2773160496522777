"""`maxStaleness: 1` with real engines: each step is generated with the weights of two steps before, despite
failures."""

from __future__ import annotations

import json
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
from tests.integration.stopped_runs import assert_same_end

STEPS = 6
JOB: dict[str, dict[str, Any]] = {
    # Its 4 MB of weights can be sent in two halves.
    "model": {"uri": "random://qwen3?hidden=128&layers=4&heads=4&kvHeads=2&headDim=32&tied=false&initializerRange=0.1"},
    "algorithm": {"steps": STEPS, "promptsPerStep": 4, "groupSize": 4, "maxStaleness": 1, "learningRate": 1.0e-3},
    "rollout": {"replicas": 2, "gpusPerReplica": 0},
    "policy": {"gpusPerReplica": 0},
    "memory": {"microBatchTokens": 192},
    "recovery": {"maxAdjustments": 20},
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
ROOM = {
    "empty_cache": False,
    "expandable_segments": False,
    "rollout_sleep": "Disabled",
    "kv_cache_bytes": 256 << 20,
    "micro_batch_tokens": 192,
    "logprob_chunk_tokens": 8192,
    "activation_checkpointing": False,
    "optimizer_offload": False,
    "sync_bucket_bytes": 256 << 20,
}
"""The plan that is computed for so small a model has nothing left to shrink."""


def staleness_run(directory: Path, checkpoint: dict[str, int], *faults: str) -> Run:
    directory.mkdir()
    manifest = write_manifest(
        directory / "job.yaml", **JOB, checkpoint=checkpoint, faultInjection={"enabled": bool(faults)}
    )
    job = yaml.safe_load(manifest.read_text())
    job["spec"]["topology"] = "Disaggregated"
    manifest.write_text(yaml.safe_dump(job))
    (directory / "plan.json").write_text(json.dumps(ROOM))
    options = (f"--fault={fault}" for fault in faults)
    run = rljob_run(manifest, directory / "run", "--plan", directory / "plan.json", *options)
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return staleness_run(tmp_path_factory.mktemp("stale") / "whole", KEPT)


def test_the_log_probabilities_are_those_of_the_weights_that_generated(whole: Run, tmp_path: Path) -> None:
    batches = [RolloutBatch.load(path) for path in sorted((whole.output / "journal").glob("step-*.npz"))]
    assert [batch.weights_version for batch in batches] == [max(step - 2, 0) for step in range(1, STEPS + 1)]
    assert_recorded_weights_generated_every_token(recomputed(whole.output, tmp_path))


@pytest.mark.long
def test_failures_in_every_phase_change_no_bit(whole: Run, tmp_path: Path) -> None:
    failed = staleness_run(tmp_path / "failed", {"everySteps": 2}, *FAULTS)
    assert len([record for record in failed.ledger if record["kind"] == "fault"]) == len(FAULTS)
    assert_same_end(failed, whole)
    for step, expected in zip(failed.steps, whole.steps, strict=True):
        assert (step["step"], step["reward"], step["metrics"]) == (
            expected["step"],
            expected["reward"],
            expected["metrics"],
        )
