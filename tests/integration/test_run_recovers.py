"""Failures on purpose in every phase: the run ends with the weights, the rewards and the steps of one without any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_testing.runs import COLD, FinishedRun, rljob_run, write_manifest
from tests.integration.compared_runs import (
    LARGE_MODEL,
    ROOMY_PLAN,
    assert_same_end,
    assert_same_ledger,
    assert_same_weights,
    completed_run,
    disaggregated_manifest,
    injected,
    plan_changes,
)

STEPS = 5
HANG_SECONDS = 60
JOB: dict[str, dict[str, Any]] = {
    "model": {"uri": LARGE_MODEL},
    # AdamW divides a gradient by its own size: where that is next to nothing, the rounding of other micro-batches comes
    # out as a part of the learning rate.
    "algorithm": {"steps": STEPS, "promptsPerStep": 4, "groupSize": 4, "learningRate": 1.0e-4},
    "checkpoint": {"everySteps": 2},
    "faultInjection": {"enabled": True},
    "recovery": {"maxAdjustments": 20},
}
SAME_MICRO_BATCHES = {"memory": {"microBatchTokens": ROOMY_PLAN["micro_batch_tokens"]}}


def run_with(directory: Path, manifest: Path, *faults: str, **plan: object) -> FinishedRun:
    (directory / "plan.json").write_text(json.dumps(ROOMY_PLAN | plan))
    options = [f"--fault={fault}" for fault in faults]
    return completed_run(manifest, directory / "run", "--plan", directory / "plan.json", *options)


@pytest.fixture(scope="module")
def without_failure(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    directory = tmp_path_factory.mktemp("whole")
    return run_with(directory, write_manifest(directory / "job.yaml", **JOB))


def rewards(run: FinishedRun) -> list[tuple[int, float]]:
    return [(step["step"], step["reward"]["mean"]) for step in run.steps]


def test_with_the_same_micro_batches_failures_change_not_a_bit(without_failure: FinishedRun, tmp_path: Path) -> None:
    """Nor do weights that are in host memory while the engine generates, fails and starts again."""
    manifest = write_manifest(tmp_path / "job.yaml", **JOB, **SAME_MICRO_BATCHES)
    faults = [
        "KVCacheOversized@rollout:2",
        "KVCacheOversized@load:2",
        "ActivationSpike@checkpoint:2",
        "WeightSyncSpike@sync:3",
        "OptimizerState@optimizer:4",
    ]
    run = run_with(tmp_path, manifest, *faults, policy_offload=True)

    assert len(run.attempts) == 1, "all of it was mended within the attempt"
    assert len(set(injected(run))) == len(faults)
    changes = plan_changes(run)
    assert [change["generation"] for change in changes] == list(range(2, 2 + len(faults)))
    unproved = [change["generation"] for change in changes if change["secondsToRecover"] is None]
    assert unproved == [2], "the engine failed once more before the first change could prove itself"
    assert "microBatchTokens" not in [change["remedy"]["setting"] for change in changes], "it is pinned"
    assert_same_end(run, without_failure)


@pytest.mark.long
def test_separate_engines_give_the_same_bits_after_every_failure(without_failure: FinishedRun, tmp_path: Path) -> None:
    manifest = disaggregated_manifest(tmp_path / "job.yaml", **JOB, **SAME_MICRO_BATCHES)
    faults = [
        "KVCacheOversized@rollout:2",
        "KVCacheOversized@load:2",
        "ActivationSpike@checkpoint:2",
        "WeightSyncSpike@sync:3",
        "KVCacheOversized@sync:4",
        "OptimizerState@optimizer:4",
        "WorkerLost@sync:5",
    ]
    run = run_with(tmp_path, manifest, *faults)

    assert len(injected(run)) == len(faults)
    assert len(run.attempts) == 2, "only the lost process costs an attempt"
    assert run.attempts[0]["processes"].keys() == {"controller", "policy-0", "rollout-0"}
    settings = {change["remedy"]["setting"] for change in plan_changes(run)}
    assert settings.isdisjoint({"rolloutSleep", "emptyCache", "weightExport"})
    assert_same_end(run, without_failure)
    for step, same_step in zip(run.steps, without_failure.steps, strict=True):
        of_algorithm = ("reward", "response", "tokens", "weights_version")
        assert [step[name] for name in of_algorithm] == [same_step[name] for name in of_algorithm]
        assert step["metrics"]["loss"] == same_step["metrics"]["loss"]


def test_changed_micro_batches_lost_and_hanging_processes_keep_the_result(
    without_failure: FinishedRun, tmp_path: Path
) -> None:
    # Without a checkpoint in between: while one is being written, the deadline is later.
    changes = {
        "checkpoint": {"everySteps": STEPS},
        "recovery": JOB["recovery"] | {"phaseDeadlineSeconds": HANG_SECONDS},
    }
    manifest = write_manifest(tmp_path / "job.yaml", **JOB | changes)
    run = run_with(tmp_path, manifest, "ActivationSpike@update:2x2", "WorkerLost@update:3", "Hang@update:4")

    assert "microBatchTokens 192 → 96 (generation 2" in run.printed
    assert "Recovered: resumed at step 2 after" in run.printed
    assert "Replacing a process: policy-0 died while updating (restart 1 of 3); the other role" in run.printed
    hung = f"policy-0 did not finish updating within {HANG_SECONDS} s (recovery.phaseDeadlineSeconds)"
    assert f"Restarting: {hung}; it was in _hang (faults.py:" in " ".join(run.printed.split())
    assert "=== policy-0\n" in (run.output / "logs" / "stacks-step-4-update.txt").read_text()
    assert [attempt["plan"]["generation"] for attempt in run.attempts] == [1, 3], "the changed plan is gone on with"
    assert [step["step"] for step in run.steps] == list(range(1, STEPS + 1))
    assert [reward for _, reward in rewards(run)] == pytest.approx([r for _, r in rewards(without_failure)], abs=1e-6)
    assert_same_weights(run, without_failure, tolerance=1e-6)
    assert [change["remedy"]["setting"] for change in run.summary["plan_changes"]] == ["microBatchTokens"] * 2


def test_a_pinned_setting_in_the_way_ends_the_run_with_an_explanation(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "job.yaml", **JOB, memory={"kvCache": ROOMY_PLAN["kv_cache_bytes"]})
    (tmp_path / "plan.json").write_text(json.dumps(ROOMY_PLAN))
    run = rljob_run(manifest, tmp_path / "run", "--plan", tmp_path / "plan.json", "--fault=KVCacheOversized@load:1")
    assert run.exit_code == ExitCode.DEVICE_OUT_OF_MEMORY, run.printed
    assert "memory.kvCache is pinned to 256Mi: write 192Mi, or Auto" in run.printed
    assert run.summary["status"] == "Failed"


def test_faults_are_refused_unless_the_job_allows_them(tmp_path: Path) -> None:
    job = {name: spec for name, spec in JOB.items() if name != "faultInjection"}
    manifest = write_manifest(tmp_path / "job.yaml", **job)
    run = rljob_run(manifest, tmp_path / "run", "--fault=WorkerLost@update:1")
    assert run.exit_code == ExitCode.INVALID_MANIFEST
    assert "faultInjection: {enabled: true}" in run.printed
    assert not run.output.exists()


# --- processes that start as forks, with their imports done ---


def test_a_warm_run_that_loses_its_engine_has_the_bits_of_a_cold_one(tmp_path: Path) -> None:
    manifest = write_manifest(
        tmp_path / "job.yaml",
        algorithm={"steps": 3, "promptsPerStep": 4, "groupSize": 4},
        faultInjection={"enabled": True},
    )
    cold = rljob_run(manifest, tmp_path / "cold", **COLD)
    warm = completed_run(manifest, tmp_path / "warm", "--fault=WorkerLost@rollout:2")
    logs = [run.output / "logs" / f"{role}-0.log" for run in (cold, warm) for role in ("policy", "rollout")]
    texts = [log.read_text() for log in logs]
    assert [text.count("with its imports done") for text in texts] == [0, 0, 1, 2], "both engines were warm"
    assert "rollout-0 died" in warm.printed
    [attempt] = warm.attempts
    assert f"process {attempt['processes']['rollout-0']} with its imports done" in texts[-1]
    assert_same_ledger(warm, cold)
    assert_same_weights(warm, cold)
