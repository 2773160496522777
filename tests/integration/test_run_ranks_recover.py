"""Runs with several policy ranks, of which one fails in every phase and is lost, and two engines, of which one is lost.

In both topologies, the weights and the ledger are those of one run without failures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
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
APART_FAULTS = [
    {"class": "KVCacheOversized", "phase": "load", "step": 1, "rank": 1},
    *FAULTS[:2],
    {"class": "KVCacheOversized", "phase": "rollout", "step": 2, "rank": 1},
    {"class": "WeightSyncSpike", "phase": "sync", "step": 2, "rank": 1},
    {"class": "WorkerLost", "phase": "rollout", "step": 3, "rank": 0},
    {"class": "WorkerLost", "phase": "checkpoint", "step": 3, "rank": 1},
]
FIRST_BUCKET_BYTES = 256 << 20
MICRO_BATCH_TOKENS = 48


PLAN = {"micro_batch_tokens": 192, "sync_bucket_bytes": FIRST_BUCKET_BYTES, "kv_cache_bytes": 64 << 20}


def run_under(
    plan: dict[str, Any],
    directory: Path,
    faults: list[dict[str, Any]],
    apart: dict[str, Any] | None = None,
    **recovery: int,
) -> Run:
    """`apart`: changes of the manifest for engines of their own; None: colocated."""
    directory.mkdir(exist_ok=True)
    (directory / "plan.json").write_text(json.dumps(memory_plan(**plan).model_dump(mode="json", by_alias=True)))
    injection = {"enabled": bool(faults), "faults": faults}
    recovery = {"maxAdjustments": 20} | recovery
    changes = JOB | {"faultInjection": injection, "recovery": recovery} | (apart or {})
    manifest = write_manifest(directory / "job.yaml", **changes)
    if apart is not None:
        job = yaml.safe_load(manifest.read_text())
        job["spec"]["topology"] = "Disaggregated"
        manifest.write_text(yaml.safe_dump(job))
    return rljob_run(manifest, directory / "run", "--plan", directory / "plan.json")


def learned(run: Run) -> list[tuple[Any, ...]]:
    """The content of the ledger that follows from the job alone."""
    return [(step["step"], step["reward"], step["metrics"]) for step in run.steps]


def starts(run: Run) -> dict[str, int]:
    """Number of starts of each process, by its name."""
    logs = (run.output / "logs").glob("*-[01].log")
    return {log.stem: log.read_text().count(f"{log.stem} starts as process") for log in logs}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A colocated run of two ranks without failures."""
    plan = {**PLAN, "micro_batch_tokens": MICRO_BATCH_TOKENS}
    run = run_under(plan, tmp_path_factory.mktemp("whole"), [])
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    return run


def weights(run: Run) -> dict[str, Any]:
    return dict(load_file(run.output / "model" / "model.safetensors"))


def assert_same_bits(run: Run, whole: Run) -> None:
    assert learned(run) == learned(whole)
    found = weights(run)
    for name, expected in weights(whole).items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


def test_failing_and_lost_ranks_and_a_lost_engine_change_no_weight(whole: Run, tmp_path: Path) -> None:
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
    assert int(by_generation[1]["remedy"]["after"]) == MICRO_BATCH_TOKENS
    assert_same_bits(failed, whole)


def test_two_ranks_with_engines_of_their_own_give_the_same_bits(whole: Run, tmp_path: Path) -> None:
    apart = {"rollout": {"replicas": 2, "gpusPerReplica": 0}}
    failed = run_under({**PLAN, "kv_cache_bytes": 256 << 20}, tmp_path / "failed", APART_FAULTS, apart)
    assert failed.exit_code == ExitCode.COMPLETE, failed.printed
    assert len([line for line in failed.ledger if line["kind"] == "fault"]) == len(APART_FAULTS)
    assert len(failed.attempts) == 2, "only the lost rank costs an attempt"
    assert failed.attempts[0]["processes"].keys() == {
        "controller",
        *("policy-0", "policy-1"),
        *("rollout-0", "rollout-1"),
    }
    assert starts(failed)["policy-1"] == 3, "it was loading beside the failed engine; later it was lost"
    assert_same_bits(failed, whole)


def test_four_ranks_recover_and_learn_what_two_learn(whole: Run, tmp_path: Path) -> None:
    apart = {"policy": {"replicas": 4, "gpusPerReplica": 0}, "rollout": {"replicas": 1, "gpusPerReplica": 0}}
    faults = [fault | {"rank": rank} for fault, rank in zip(FAULTS[:3], (3, 2, 1), strict=True)]
    failed = run_under(PLAN, tmp_path / "failed", faults, apart)
    assert failed.exit_code == ExitCode.COMPLETE, failed.printed
    assert len(failed.attempts) == 1
    logs = sorted((failed.output / "logs").glob("policy-?.log"))
    assert [log.read_text().count("starts as process") for log in logs] == [1, 1, 1, 1], "no failure ended a rank"
    assert [step["reward"] for step in failed.steps] == [step["reward"] for step in whole.steps]
    found = weights(failed)
    for name, expected in weights(whole).items():  # the gradient is summed in another order
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-5, err_msg=name)
