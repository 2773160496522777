"""Failures on purpose in every phase: the run ends with the weights, the rewards and the steps of one without any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml
from safetensors.numpy import load_file

from rljob_api.exit_codes import ExitCode
from rljob_testing.runs import Run, rljob_run, write_manifest

STEPS = 5
HANG_SECONDS = 60
JOB: dict[str, dict[str, Any]] = {
    # Its 4 MB of weights can be sent in two halves.
    "model": {"uri": "random://qwen3?hidden=128&layers=4&heads=4&kvHeads=2&headDim=32&tied=false&initializerRange=0.1"},
    # AdamW divides a gradient by its own size: where that is next to nothing, the rounding of other micro-batches comes
    # out as a part of the learning rate.
    "algorithm": {"steps": STEPS, "promptsPerStep": 4, "groupSize": 4, "learningRate": 1.0e-4},
    "checkpoint": {"everySteps": 2},
    "faultInjection": {"enabled": True},
    "recovery": {"maxAdjustments": 20},
}
FIRST_PLAN = {
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


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_manifest(tmp_path_factory.mktemp("job") / "job.yaml", **JOB)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan with settings to reduce: the plan computed for so small a model has none."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(json.dumps(FIRST_PLAN))
    return path


@pytest.fixture(scope="module")
def without_failure(manifest: Path, plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = rljob_run(manifest, tmp_path_factory.mktemp("whole") / "run", "--plan", plan)
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    return run


def weights(run: Run) -> Mapping[str, npt.NDArray[Any]]:
    return load_file(run.output / "model" / "model.safetensors")


def rewards(run: Run) -> list[tuple[int, float]]:
    return [(step["step"], step["reward"]["mean"]) for step in run.steps]


def plan_changes(run: Run) -> list[dict[str, Any]]:
    """The latest record of each change."""
    records = [line for line in run.ledger if line["kind"] == "plan_change"]
    return list({record["change"]["generation"]: record for record in records}.values())


def test_with_the_same_micro_batches_failures_change_not_a_bit(without_failure: Run, tmp_path: Path) -> None:
    """Nor do weights that are in host memory while the engine generates, fails and starts again."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(FIRST_PLAN | {"policy_offload": True}))
    manifest = write_manifest(
        tmp_path / "job.yaml", **JOB, memory={"microBatchTokens": FIRST_PLAN["micro_batch_tokens"]}
    )
    faults = [
        "KVCacheOversized@rollout:2",
        "KVCacheOversized@load:2",
        "ActivationSpike@checkpoint:2",
        "WeightSyncSpike@sync:3",
        "OptimizerState@optimizer:4",
    ]
    run = rljob_run(manifest, tmp_path / "run", "--plan", plan, *(f"--fault={fault}" for fault in faults))

    assert run.exit_code == ExitCode.COMPLETE, run.printed
    assert len(run.attempts) == 1, "all of it was mended within the attempt"
    given = {(record["fault_class"], record["phase"]) for record in run.ledger if record["kind"] == "fault"}
    assert len(given) == len(faults)
    changes = plan_changes(run)
    assert [record["change"]["generation"] for record in changes] == list(range(2, 2 + len(faults)))
    unproved = [r["change"]["generation"] for r in changes if r["change"]["secondsToRecover"] is None]
    assert unproved == [2], "the engine failed once more before the first change could prove itself"
    assert "microBatchTokens" not in [record["change"]["remedy"]["setting"] for record in changes], "it is pinned"
    assert rewards(run) == rewards(without_failure)
    for name, expected in weights(without_failure).items():
        np.testing.assert_array_equal(weights(run)[name], expected, err_msg=name)


@pytest.mark.long
def test_engines_of_their_own_give_the_same_bits_whatever_fails(
    plan: Path, without_failure: Run, tmp_path: Path
) -> None:
    memory = {"microBatchTokens": FIRST_PLAN["micro_batch_tokens"]}
    manifest = write_manifest(tmp_path / "job.yaml", **JOB, memory=memory)
    job = yaml.safe_load(manifest.read_text())
    job["spec"]["topology"] = "Disaggregated"
    manifest.write_text(yaml.safe_dump(job))
    faults = [
        "KVCacheOversized@rollout:2",
        "KVCacheOversized@load:2",
        "ActivationSpike@checkpoint:2",
        "WeightSyncSpike@sync:3",
        "KVCacheOversized@sync:4",
        "OptimizerState@optimizer:4",
        "WorkerLost@sync:5",
    ]
    run = rljob_run(manifest, tmp_path / "run", "--plan", plan, *(f"--fault={fault}" for fault in faults))

    assert run.exit_code == ExitCode.COMPLETE, run.printed
    assert len([record for record in run.ledger if record["kind"] == "fault"]) == len(faults)
    assert len(run.attempts) == 2, "only the lost process costs an attempt"
    assert run.attempts[0]["processes"].keys() == {"controller", "policy-0", "rollout-0"}
    settings = {record["change"]["remedy"]["setting"] for record in plan_changes(run)}
    assert settings.isdisjoint({"rolloutSleep", "emptyCache", "weightExport"})
    assert rewards(run) == rewards(without_failure)
    for name, expected in weights(without_failure).items():
        np.testing.assert_array_equal(weights(run)[name], expected, err_msg=name)
    for step, same_step in zip(run.steps, without_failure.steps, strict=True):
        of_algorithm = ("reward", "response", "tokens", "weights_version")
        assert [step[name] for name in of_algorithm] == [same_step[name] for name in of_algorithm]
        assert step["metrics"]["loss"] == same_step["metrics"]["loss"]


def test_changed_micro_batches_lost_and_hanging_processes_keep_the_result(
    plan: Path, without_failure: Run, tmp_path: Path
) -> None:
    # Without a checkpoint in between: while one is being written, the deadline is later.
    changes = {
        "checkpoint": {"everySteps": STEPS},
        "recovery": JOB["recovery"] | {"phaseDeadlineSeconds": HANG_SECONDS},
    }
    manifest = write_manifest(tmp_path / "job.yaml", **JOB | changes)
    faults = ["ActivationSpike@update:2x2", "WorkerLost@update:3", "Hang@update:4"]
    run = rljob_run(manifest, tmp_path / "run", "--plan", plan, *(f"--fault={fault}" for fault in faults))

    assert run.exit_code == ExitCode.COMPLETE, run.printed
    assert "microBatchTokens 192 → 96 (generation 2" in run.printed
    assert "Recovered: resumed at step 2 after" in run.printed
    assert "Restarting: policy-0 died while updating (restart 1 of 3)" in run.printed
    hung = f"policy-0 did not finish updating within {HANG_SECONDS} s (recovery.phaseDeadlineSeconds)"
    assert f"Restarting: {hung}; it was in _hang (faults.py:" in " ".join(run.printed.split())
    assert "=== policy-0\n" in (run.output / "logs" / "stacks-step-4-update.txt").read_text()
    assert [attempt["plan"]["generation"] for attempt in run.attempts] == [1, 3, 3], "the changed plan is gone on with"
    assert [step["step"] for step in run.steps] == list(range(1, STEPS + 1))
    assert [reward for _, reward in rewards(run)] == pytest.approx([r for _, r in rewards(without_failure)], abs=1e-6)
    for name, expected in weights(without_failure).items():
        np.testing.assert_allclose(weights(run)[name], expected, rtol=0, atol=1e-6, err_msg=name)
    assert [change["remedy"]["setting"] for change in run.summary["plan_changes"]] == ["microBatchTokens"] * 2


def test_a_pinned_setting_in_the_way_ends_the_run_with_the_whole_account(plan: Path, tmp_path: Path) -> None:
    pinned = {"kvCache": FIRST_PLAN["kv_cache_bytes"]}
    manifest = write_manifest(tmp_path / "job.yaml", **JOB, memory=pinned)
    run = rljob_run(manifest, tmp_path / "run", "--plan", plan, "--fault=KVCacheOversized@load:1")
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
