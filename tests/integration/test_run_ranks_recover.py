"""Runs with two or four policy ranks and failures in every phase, in both topologies.

Four ranks run out of memory only. Of two, one is lost as well, and one of their two engines. The weights and the ledger
are those of a run of as many ranks without failures, which both topologies share.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from rljob_testing.memory_plans import memory_plan
from rljob_testing.runs import FinishedRun, write_manifest
from tests.integration.compared_runs import (
    LARGE_MODEL,
    assert_same_ledger,
    assert_same_weights,
    completed_run,
    disaggregated_manifest,
    injected,
    plan_changes,
)

Topology = Literal["Colocated", "Disaggregated"]
Fault = dict[str, Any]

JOB: dict[str, dict[str, Any]] = {
    "model": {"uri": LARGE_MODEL},
    "algorithm": {"steps": 4, "promptsPerStep": 4, "groupSize": 8, "learningRate": 1.0e-4},
    "checkpoint": {"everySteps": 3},
}
IN_LOAD: Fault = {"class": "ActivationSpike", "phase": "load", "step": 1, "rank": 1}
IN_UPDATE: Fault = {"class": "ActivationSpike", "phase": "update", "step": 1, "rank": 1}
IN_OPTIMIZER: Fault = {"class": "OptimizerState", "phase": "optimizer", "step": 1, "rank": 1}
IN_SYNC: Fault = {"class": "WeightSyncSpike", "phase": "sync", "step": 2, "rank": 1}
IN_CHECKPOINT: Fault = {"class": "ActivationSpike", "phase": "checkpoint", "step": 3, "rank": 1}

COLOCATED_FAULTS = [
    *(IN_LOAD, IN_UPDATE, IN_OPTIMIZER, IN_SYNC),
    {"class": "WorkerLost", "phase": "update", "step": 3, "rank": 1},
    IN_CHECKPOINT,
    {"class": "WorkerLost", "phase": "rollout", "step": 4, "rank": 1},
]
APART_FAULTS = [
    *(IN_LOAD, IN_UPDATE, IN_OPTIMIZER, IN_SYNC),
    {"class": "WorkerLost", "phase": "rollout", "step": 3, "rank": 0},
    {"class": "WorkerLost", "phase": "checkpoint", "step": 3, "rank": 1},
]
MICRO_BATCH_TOKENS = 24
"""After the failures of step 1, and in a run without: other micro-batches would add the gradients in another order."""

PLAN = {
    "micro_batch_tokens": 192,
    "sync_bucket_bytes": 256 << 20,
    # 1 MiB above the smallest. For a policy that loads, smaller micro-batches free more, so the engines keep starting;
    # for a checkpoint, a smaller cache is the only remedy.
    "kv_cache_bytes": 65 << 20,
}
SMALLER_POLICY = ("microBatchTokens", "RespawnRole")
SMALLER_UPDATE = ("microBatchTokens", "Live")
SMALLER_SYNC = ("syncBucketSize", "Live")
SMALLER_CACHE = ("kvCache", "RespawnRole")
"""Settings that change, and the levels: this one starts all engines again."""


def run_under(
    plan: dict[str, Any],
    directory: Path,
    faults: list[Fault],
    topology: Topology = "Colocated",
    *,
    ranks: int = 2,
    engines: int = 1,
) -> FinishedRun:
    """`engines`: if they are not colocated with the ranks."""
    directory.mkdir(exist_ok=True)
    (directory / "plan.json").write_text(json.dumps(memory_plan(**plan).model_dump(mode="json", by_alias=True)))
    changes: dict[str, dict[str, Any]] = {
        "policy": {"replicas": ranks, "gpusPerReplica": 0},
        "faultInjection": {"enabled": bool(faults), "faults": faults},
        "recovery": {"maxAdjustments": 20},
    }
    write = write_manifest
    if topology == "Disaggregated":
        changes["rollout"] = {"replicas": engines, "gpusPerReplica": 0}
        write = disaggregated_manifest
    manifest = write(directory / "job.yaml", **JOB, **changes)
    return completed_run(manifest, directory / "run", "--plan", directory / "plan.json")


def whole_run(directory: Path, ranks: int) -> FinishedRun:
    """A run without failures. It has one engine, since these take longest to start."""
    return run_under({**PLAN, "micro_batch_tokens": MICRO_BATCH_TOKENS}, directory, [], "Disaggregated", ranks=ranks)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return whole_run(tmp_path_factory.mktemp("whole"), ranks=2)


@pytest.fixture(scope="module")
def whole_of_four(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return whole_run(tmp_path_factory.mktemp("whole_of_four"), ranks=4)


def remedies(run: FinishedRun) -> list[tuple[str, str]]:
    """The setting and the level of each change of the plan."""
    return [(change["remedy"]["setting"], change["level"]) for change in plan_changes(run)]


def starts(run: FinishedRun) -> dict[str, int]:
    """Number of starts of each process, by its name."""
    logs = sorted((run.output / "logs").glob("*-[0-3].log"))
    return {log.stem: log.read_text().count(f"{log.stem} starts as process") for log in logs}


def assert_same_bits(run: FinishedRun, whole: FinishedRun) -> None:
    changes = [change["remedy"] for change in plan_changes(run)]
    tokens = [int(change["after"]) for change in changes if change["setting"] == "microBatchTokens"]
    assert tokens[-1] == MICRO_BATCH_TOKENS
    assert_same_ledger(run, whole)
    assert_same_weights(run, whole)


def test_failing_and_lost_ranks_and_a_lost_engine_change_no_weight(whole: FinishedRun, tmp_path: Path) -> None:
    failed = run_under(PLAN, tmp_path / "failed", COLOCATED_FAULTS)
    assert len(injected(failed)) == len(COLOCATED_FAULTS)
    assert [step["step"] for step in failed.steps] == [1, 2, 3, 4]
    assert len(failed.attempts) == 1
    assert "Replacing a process: policy-1 died while updating (restart 1 of 3); the other role" in failed.printed
    assert "Replacing a process: rollout-1 died while generating (restart 1 of 3); its prompts" in failed.printed
    replayed = [line["replayed_steps"] for line in failed.ledger if line["kind"] == "restore"]
    assert [steps for steps in replayed if steps] == [2], "only the new ranks had anything to learn again"
    assert remedies(failed) == [SMALLER_POLICY, SMALLER_UPDATE, SMALLER_UPDATE, SMALLER_SYNC, SMALLER_CACHE]
    # The ranks start again for the load and the lost rank; engines for the checkpoint and the lost engine.
    assert starts(failed) == {"policy-0": 3, "policy-1": 3, "rollout-0": 2, "rollout-1": 3}
    assert_same_bits(failed, whole)


@pytest.mark.long
def test_two_ranks_with_separate_engines_give_the_same_bits(whole: FinishedRun, tmp_path: Path) -> None:
    failed = run_under(PLAN, tmp_path / "failed", APART_FAULTS, "Disaggregated", engines=2)
    assert len(injected(failed)) == len(APART_FAULTS)
    assert len(failed.attempts) == 1
    assert failed.attempts[0]["processes"].keys() == {
        "controller",
        *("policy-0", "policy-1"),
        *("rollout-0", "rollout-1"),
    }
    assert remedies(failed) == [SMALLER_POLICY, SMALLER_UPDATE, SMALLER_UPDATE, SMALLER_SYNC]
    assert starts(failed) == {"policy-0": 3, "policy-1": 3, "rollout-0": 2, "rollout-1": 1}
    assert_same_bits(failed, whole)


@pytest.mark.long
@pytest.mark.parametrize(("topology", "engines"), [("Colocated", 4), ("Disaggregated", 1)])
def test_four_ranks_that_fail_in_every_phase_learn_the_same_bits(
    whole_of_four: FinishedRun, tmp_path: Path, topology: Topology, engines: int
) -> None:
    last_engine = {"class": "KVCacheOversized", "step": 2, "rank": engines - 1}
    faults = [
        IN_UPDATE | {"rank": 3},
        IN_OPTIMIZER | {"rank": 2},
        last_engine | {"phase": "rollout"},
        last_engine | {"phase": "load"},
        IN_SYNC,
        IN_CHECKPOINT | {"rank": 3},
    ]
    plan = PLAN | {"kv_cache_bytes": 256 << 20}
    failed = run_under(plan, tmp_path / "failed", faults, topology, ranks=4)
    assert injected(failed) == [(fault["class"], fault["phase"]) for fault in faults]
    assert len(failed.attempts) == 1
    # An engine fails while it generates and while it starts again; all make room for the checkpoint.
    assert remedies(failed) == [*[SMALLER_UPDATE] * 2, *[SMALLER_CACHE] * 2, SMALLER_SYNC, SMALLER_CACHE]
    assert starts(failed) == {f"policy-{rank}": 1 for rank in range(4)} | {f"rollout-{i}": 4 for i in range(engines)}
    assert_same_bits(failed, whole_of_four)


# --- another number of ranks ---

GROWING_JOB: dict[str, dict[str, Any]] = {
    "policy": {"gpusPerReplica": 0},
    "algorithm": {"steps": 4, "promptsPerStep": 4, "groupSize": 8, "learningRate": 1.0e-4},
    "checkpoint": {"everySteps": 2},
    "recovery": {"maxAdjustments": 0, "maxGpus": 2},
}
GROWING_FAULT = {"class": "OptimizerState", "phase": "update", "step": 4}


def growing_run(directory: Path, faults: list[Fault]) -> FinishedRun:
    directory.mkdir()
    injection = {"enabled": bool(faults), "faults": faults}
    return completed_run(
        write_manifest(directory / "job.yaml", **GROWING_JOB, faultInjection=injection), directory / "run"
    )


@pytest.mark.long
def test_the_failed_step_is_repeated_on_more_ranks_with_the_same_rollouts(tmp_path: Path) -> None:
    grown, whole = growing_run(tmp_path / "grown", [GROWING_FAULT]), growing_run(tmp_path / "whole", [])

    [change] = plan_changes(grown)
    remedy = change["remedy"]
    assert (remedy["setting"], remedy["before"], remedy["after"]) == ("policyGpus", "1", "2")
    assert (change["level"], change["step"]) == ("RestartInPlace", 4)
    assert "PlanChanged: policyGpus 1 → 2 (generation 2" in grown.printed
    assert [len(attempt["processes"]) for attempt in grown.attempts] == [3, 5], "controller, ranks and engines"
    restored = [line for line in grown.ledger if line["kind"] == "restore"][-1]
    assert (restored["attempt"], restored["checkpoint_step"], restored["replayed_steps"]) == (2, 2, 1)

    assert [step["attempt"] for step in grown.steps] == [1, 1, 1, 2]
    assert [step["reward"] for step in grown.steps] == [step["reward"] for step in whole.steps]
    failed, expected = grown.steps[-1]["metrics"], whole.steps[-1]["metrics"]
    assert failed["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert failed["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert_same_weights(grown, whole, tolerance=1e-6)


# --- an engine of two processes ---


@pytest.mark.long
def test_an_engine_of_which_one_process_fails_is_replaced_whole(tmp_path: Path) -> None:
    """The second process runs out of memory, for which the first one then waits."""
    fault = {"class": "KVCacheOversized", "phase": "rollout", "step": 2, "rank": 1}
    manifest = write_manifest(
        tmp_path / "job.yaml",
        algorithm={"steps": 4},
        policy={"gpusPerReplica": 2},  # with --device cpu: two processes of each role
        rollout={"tensorParallelSize": 2},
        faultInjection={"enabled": True, "faults": [fault]},
    )
    (tmp_path / "plan.json").write_text(json.dumps(memory_plan(kv_cache_bytes=128 << 20).model_dump(mode="json")))
    run = completed_run(manifest, tmp_path / "run", "--plan", tmp_path / "plan.json")
    [attempt] = run.attempts
    assert attempt["processes"].keys() == {"controller", "policy-0", "policy-1", "rollout-0", "rollout-1"}
    assert "rollout rank 1 in rollout, step 2: KVCacheOversized" in run.printed
    assert starts(run) == {"policy-0": 1, "policy-1": 1, "rollout-0": 2, "rollout-1": 2}
    assert [step["weights_version"] for step in run.steps] == [1, 2, 3, 4]
    assert max(step["metrics"]["logprob_diff_max"] for step in run.steps) <= 1e-4
