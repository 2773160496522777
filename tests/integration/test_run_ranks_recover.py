"""A run with two policy ranks, of which one fails in every phase and is lost, and two engines, of which one is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from rljob_api.exit_codes import ExitCode
from rljob_testing.memory_plans import memory_plan
from rljob_testing.runs import Run, rljob_run, write_manifest

JOB: dict[str, dict[str, Any]] = {
    # Its 4 MB of weights can be sent in two halves.
    "model": {"uri": "random://qwen3?hidden=128&layers=4&heads=4&kvHeads=2&headDim=32&tied=false&initializerRange=0.1"},
    "policy": {"replicas": 2, "gpusPerReplica": 0},
    "algorithm": {"steps": 4, "promptsPerStep": 4, "groupSize": 8, "learningRate": 1.0e-4},
    "checkpoint": {"everySteps": 3},
}
FAULTS = [
    {"class": "ActivationSpike", "phase": "update", "step": 1, "rank": 1},
    {"class": "OptimizerState", "phase": "optimizer", "step": 1, "rank": 1},
    {"class": "WeightSyncSpike", "phase": "sync", "step": 2, "rank": 1},
    {"class": "WorkerLost", "phase": "update", "step": 3, "rank": 1},
    {"class": "WorkerLost", "phase": "rollout", "step": 4, "rank": 1},
]
FIRST_BUCKET_BYTES = 256 << 20


PLAN = {"micro_batch_tokens": 192, "sync_bucket_bytes": FIRST_BUCKET_BYTES, "kv_cache_bytes": 64 << 20}


def run_under(plan: dict[str, Any], directory: Path, faults: list[dict[str, Any]], **recovery: int) -> Run:
    directory.mkdir(exist_ok=True)
    (directory / "plan.json").write_text(json.dumps(memory_plan(**plan).model_dump(mode="json", by_alias=True)))
    injection = {"enabled": bool(faults), "faults": faults}
    recovery = {"maxAdjustments": 20} | recovery
    manifest = write_manifest(directory / "job.yaml", **JOB, faultInjection=injection, recovery=recovery)
    return rljob_run(manifest, directory / "run", "--plan", directory / "plan.json")


def learned(run: Run) -> list[tuple[Any, ...]]:
    """The content of the ledger that follows from the job alone."""
    return [(step["step"], step["reward"], step["metrics"]) for step in run.steps]


def starts(run: Run) -> dict[str, int]:
    """Number of starts of each process, by its name."""
    logs = (run.output / "logs").glob("*-[01].log")
    return {log.stem: log.read_text().count(f"{log.stem} starts as process") for log in logs}


def test_failing_and_lost_ranks_and_a_lost_engine_change_no_weight(tmp_path: Path) -> None:
    # A lost rank ends the run, as it does where somebody else begins the next attempt.
    lost = run_under(PLAN, tmp_path / "failed", FAULTS, maxRestarts=0)
    assert lost.exit_code == ExitCode.WORKER_LOST, lost.printed
    assert "policy-1" in lost.printed
    changes = [line["change"] for line in lost.ledger if line["kind"] == "plan_change"]
    by_generation = list({change["generation"]: change for change in changes}.values())
    assert [change["remedy"]["setting"] for change in by_generation] == ["microBatchTokens"] * 2 + ["syncBucketSize"]
    assert {change["level"] for change in by_generation} == {"Live"}
    assert len(lost.attempts) == 1
    assert starts(lost) == dict.fromkeys(("policy-0", "policy-1", "rollout-0", "rollout-1"), 1), "no failure ended one"

    failed = run_under(PLAN, tmp_path / "failed", FAULTS)
    assert failed.exit_code == ExitCode.COMPLETE, failed.printed
    assert [step["step"] for step in failed.steps] == [1, 2, 3, 4]
    assert len(failed.attempts) == 2, "a lost engine costs no attempt"
    assert starts(failed) == {"policy-0": 2, "policy-1": 2, "rollout-0": 2, "rollout-1": 3}
    assert "Replacing a process: rollout-1 died while generating (restart 1 of 3)" in failed.printed
    replayed = [line["replayed_steps"] for line in failed.ledger if line["kind"] == "restore"]
    assert [steps for steps in replayed if steps] == [2], "only the second run had anything to learn again"

    # Both changes of the micro-batches were made before any was learned from.
    tokens = int(by_generation[1]["remedy"]["after"])
    whole = run_under({**PLAN, "micro_batch_tokens": tokens}, tmp_path / "whole", [])
    assert whole.exit_code == ExitCode.COMPLETE, whole.printed
    assert learned(failed) == learned(whole)
    weights = load_file(failed.output / "model" / "model.safetensors")
    for name, expected in load_file(whole.output / "model" / "model.safetensors").items():
        np.testing.assert_array_equal(weights[name], expected, err_msg=name)
