"""Host memory, /dev/shm and disk, against numbers worked out by hand and against a recorded run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_memory.planning.host_memory import HostMemory, checkpoint_copy_bytes, loading_bytes, worker_host_memory
from rljob_memory.planning.job_workload import workload_of
from rljob_memory.planning.limits import claim_bytes, limit_bytes, low_limits, request_bytes, small_claim
from rljob_memory.planning.model_size import parameters_in_name, shape_in_uri, typical_shape
from rljob_memory.planning.prediction import predict, predict_before_plan
from rljob_memory.sizes import GIB, MIB
from rljob_memory.workload import ModelShape, Workload
from rljob_testing.memory_plans import memory_plan
from rljob_testing.repository import ROOT

EIGHT_B = ModelShape(8_000_000_000, 36, 4096, 8, 128, 151_936, 2, 32, 12_288)
WORK = Workload(16, 8, max_prompt_tokens=512, max_response_tokens=1024)
ON_EIGHT_GPUS = replace(WORK, policy_ranks=8, engines=8)
ON_GPU, OFFLOADED = memory_plan(optimizer_offload=False), memory_plan(optimizer_offload=True)


def spec(**given: Any) -> RLJobSpec:
    known = {"model": {"uri": "hf://Qwen/Qwen3-8B"}, "task": {"name": "digits"}, "algorithm": {"steps": 3}}
    return RLJobSpec.model_validate(known | given, by_alias=True, by_name=False)


def uses(memory: HostMemory) -> dict[str, int]:
    return {use.use: use.bytes for use in memory.uses if use.role != "controller"}


def test_loading_needs_the_pieces_being_read_for_any_size() -> None:
    assert loading_bytes(EIGHT_B, "cuda") == 256 * MIB
    assert loading_bytes(replace(EIGHT_B, adapter_parameters=1_000_000), "cuda") == 256 * MIB + 4_000_000
    assert loading_bytes(EIGHT_B, "cpu") == 0, "less than an update adds to the weights"
    memory = worker_host_memory(EIGHT_B, ON_EIGHT_GPUS, ON_GPU, "cuda", ranks=8, engine_processes=8)
    assert uses(memory)["weights being read"] == 2 * GIB
    assert uses(memory)["copy for checkpoints"] == 96e9, "12 bytes per parameter, sharded"
    assert memory.peak_bytes == sum(use.bytes for use in memory.uses if use.phase != "loading")


def test_an_offloaded_state_is_pinned_and_needs_no_copy() -> None:
    assert checkpoint_copy_bytes(EIGHT_B, WORK, OFFLOADED) == 0
    found = uses(worker_host_memory(EIGHT_B, WORK, OFFLOADED, "cuda", ranks=1, engine_processes=1))
    assert found["pinned optimizer state"] == 80e9
    with_reference = replace(WORK, reference_model=True)
    assert uses(worker_host_memory(EIGHT_B, with_reference, OFFLOADED, "cuda", ranks=1, engine_processes=1))[
        "reference model"
    ] == pytest.approx(16e9)


def test_an_engine_that_sleeps_at_level_1_keeps_its_weights_on_the_host() -> None:
    asleep = memory_plan(rollout_sleep="Level1")
    assert (
        uses(worker_host_memory(EIGHT_B, WORK, asleep, "cuda", ranks=1, engine_processes=1))[
            "weights of the sleeping engine"
        ]
        == 16e9
    )
    level_2 = worker_host_memory(
        EIGHT_B, WORK, memory_plan(rollout_sleep="Level2"), "cuda", ranks=1, engine_processes=1
    )
    assert "weights of the sleeping engine" not in uses(level_2)


def test_processes_of_an_engine_share_its_weights_and_need_dev_shm() -> None:
    at_4 = {"rollout": {"tensorParallelSize": 4}}
    apart: dict[str, Any] = {"topology": "Disaggregated", "rollout": {"gpusPerReplica": 8}}
    shared = {**apart, "rollout": {"gpusPerReplica": 8, "tensorParallelSize": 4}}
    asleep = memory_plan(rollout_sleep="Level1")
    whole, parts = (
        predict(spec(policy={"gpusPerReplica": 8}, **rollout), EIGHT_B, asleep, "cuda") for rollout in ({}, at_4)
    )
    assert uses(whole.worker)["weights of the sleeping engine"] == 8 * 16e9
    assert uses(parts.worker)["weights of the sleeping engine"] == 2 * 16e9
    assert uses(parts.worker)["processes"] == uses(whole.worker)["processes"], "a process for each GPU"
    assert parts.shared_memory_bytes - whole.shared_memory_bytes == 8 * (64 + 24) * MIB
    alone, together = (predict(spec(**given), EIGHT_B, ON_GPU, "cuda").shared_memory_bytes for given in (apart, shared))
    assert together - alone == 8 * (64 + 24) * MIB, "of the rollout pod"


def test_the_prediction_covers_a_recorded_run_and_is_not_far_off() -> None:
    """At least the recorded peak, and at most half as much again."""
    recorded = json.loads((ROOT / "bench" / "results" / "host_memory.json").read_text())
    assert {row["job"] for row in recorded["rows"]} == {"digits", "SmolLM2-135M"}
    for row in recorded["rows"]:
        assert 1.0 <= row["predicted"]["all"] / row["peak_pss_bytes"]["all"] <= 1.5, row["job"]
        assert row["predicted"]["checkpoint_bytes"] == pytest.approx(row["checkpoint_bytes"], rel=0.15)


def test_the_recorded_prediction_is_that_of_today() -> None:
    row = json.loads((ROOT / "bench" / "results" / "host_memory.json").read_text())["rows"][1]
    job = spec(model={"uri": "oci://m:1"}, algorithm={"steps": 2, "promptsPerStep": 8, "groupSize": 8})
    workload = replace(workload_of(job), max_prompt_tokens=96, max_response_tokens=16)
    shape = ModelShape(134_515_008, 30, 576, 3, 64, 49_152, 4, 9, 1536)
    plan = memory_plan(
        kv_cache_bytes=379_584_512,
        micro_batch_tokens=2688,
        logprob_chunk_tokens=1344,
        activation_checkpointing=False,
        optimizer_offload=False,
        sync_bucket_bytes=256 * MIB,
    )
    memory = worker_host_memory(shape, workload, plan, "cpu", ranks=1, engine_processes=1)
    assert memory.of_role("policy").peak_bytes == row["predicted"]["policy"]
    assert memory.of_role("rollout").peak_bytes == row["predicted"]["rollout"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen3-8B", 8e9),
        ("Qwen/Qwen2.5-0.5B-Instruct@main", 0.5e9),
        ("localhost/models/smollm2-135m-instruct:1", 135e6),
        ("Qwen/Qwen3-30B-A3B", 30e9),
        ("Qwen/Qwen2.5-7B-Instruct-1M", 7e9),
        ("org/phi-4", None),
        ("claim/path", None),
        ("a" * 1000, None),
    ],
)
def test_the_size_is_read_from_a_models_name(name: str, parameters: float | None) -> None:
    assert parameters_in_name(name) == parameters


def test_the_shape_of_random_weights_is_that_of_their_query() -> None:
    uri = "random://qwen3?hidden=64&layers=2&heads=4&kvHeads=2&headDim=32&vocabulary=64&tied=false"
    shape = shape_in_uri(spec(model={"uri": uri}), 4)
    assert shape is not None
    assert (shape.parameters, shape.layers, shape.hidden) == (pytest.approx(156_096, rel=0.01), 2, 64)
    assert shape_in_uri(spec(model={"uri": "random://qwen3?hidden=many"}), 4) is None
    assert shape_in_uri(spec(model={"uri": "random://qwen3?hidden=0"}), 4) is None


def test_a_typical_shape_is_close_to_real_ones() -> None:
    assert typical_shape(8_190_000_000, 2).hidden == pytest.approx(4096, rel=0.15)
    assert typical_shape(494_000_000, 2).hidden == pytest.approx(896, rel=0.9)


def test_before_a_plan_the_larger_of_offload_or_not_is_predicted() -> None:
    job, shape = spec(policy={"gpusPerReplica": 1}), EIGHT_B
    both = [predict(job, shape, plan, "cuda").worker.peak_bytes for plan in (ON_GPU, OFFLOADED)]
    assert predict_before_plan(job, shape, "cuda").worker.peak_bytes >= max(both)
    pinned = spec(policy={"gpusPerReplica": 1}, memory={"optimizerOffload": "Enabled"})
    assert predict_before_plan(pinned, shape, "cuda").worker.peak_bytes < max(both)


def test_disk_holds_the_checkpoints_the_model_and_its_cache() -> None:
    disk = predict(spec(checkpoint={"keep": 2}), EIGHT_B, ON_GPU, "cuda").disk
    assert (disk.checkpoint_bytes, disk.checkpoints, disk.model_bytes, disk.cache_bytes) == (96e9, 3, 16e9, 16e9)
    cached = {"uri": "hf://Qwen/Qwen3-8B", "cache": {"persistentVolumeClaim": "models"}}
    assert predict(spec(model=cached), EIGHT_B, ON_GPU, "cuda").disk.cache_bytes == 0


def test_requests_limits_and_claims_are_round_and_cover_the_prediction() -> None:
    assert request_bytes(4 * GIB + 1) == 4 * GIB + 256 * MIB
    assert limit_bytes(4 * GIB, 0) == 8 * GIB
    assert limit_bytes(4 * GIB, 64 * GIB) == 64 * GIB, "never below the request"
    assert (claim_bytes(10 * GIB, 50 * GIB), claim_bytes(100 * GIB, 50 * GIB)) == (50 * GIB, 110 * GIB)


def test_limits_and_claims_of_the_user_that_are_too_small_are_named() -> None:
    limited = {"spec": {"containers": [{"resources": {"limits": {"memory": "8Gi"}}}]}}
    job = spec(policy={"template": limited}, checkpoint={"size": "50Gi"})
    prediction = predict(job, EIGHT_B, ON_GPU, "cuda")
    ((role, message),) = low_limits(job, prediction)
    assert (role, "found 8.00 GiB; write " in message) == ("policy", True)
    assert "write 328Gi" in (small_claim(job, prediction) or "")
    assert list(low_limits(spec(), prediction)) == []
    assert small_claim(spec(), prediction) is None
