"""Host memory, /dev/shm and disk, against numbers worked out by hand and against a recorded run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.quantity import quantity_bytes
from rljob_memory.budget import Budget, Copies, Setup, budget, copies_with_room
from rljob_memory.budget.host import (
    USABLE_HOST_SHARE,
    beside_the_object_store_bytes,
    checkpoint_bytes,
    loading_bytes,
    object_store_bytes,
    object_store_room,
)
from rljob_memory.hardware import ASSUMED, DeviceKind, Hardware
from rljob_memory.model_shape import (
    _KNOWN,
    ModelShape,
    dense_parameters,
    parameters_in_name,
    shape_in_uri,
    shape_of_name,
    typical_shape,
)
from rljob_memory.pod_memory import (
    claim_bytes,
    limit_bytes,
    low_limits,
    predicted_budget,
    request_bytes,
    shared_memory_bytes,
    small_claim,
)
from rljob_memory.sizes import GIB, MIB
from rljob_memory.workload import Workload, workload_of
from rljob_testing.memory_plans import memory_plan
from rljob_testing.repository import ROOT

EIGHT_B = ModelShape(8_000_000_000, 36, 4096, 8, 128, 151_936, 2, 32, 12_288)
WORK = Workload(16, 8, max_prompt_tokens=512, max_response_tokens=1024)
ON_EIGHT_GPUS = replace(WORK, policy_ranks=8, engines=8)
ALL_COPIES = Copies()
EMBEDDING = EIGHT_B.largest_parameter_bytes / EIGHT_B.weight_bytes
ON_GPU, OFFLOADED = memory_plan(optimizer_offload=False), memory_plan(optimizer_offload=True)


def spec(**given: Any) -> RLJobSpec:
    known = {"model": {"uri": "hf://Qwen/Qwen3-8B"}, "task": {"name": "digits"}, "algorithm": {"steps": 3}}
    return RLJobSpec.model_validate(known | given, by_alias=True, by_name=False)


def predicted(
    job: RLJobSpec, model: ModelShape, plan: MemoryPlan, copies: Copies = ALL_COPIES, device: DeviceKind = "cuda"
) -> Budget:
    """The budget of a job on a machine that is not known."""
    return budget(Setup(workload_of(job), model, ASSUMED[device]), plan, copies)


def used(
    plan: MemoryPlan, model: ModelShape = EIGHT_B, work: Workload = WORK, copies: Copies = ALL_COPIES
) -> dict[str, int]:
    """Predicted host memory of a worker with GPUs, by use."""
    return uses(budget(Setup(work, model, ASSUMED["cuda"]), plan, copies))


def uses(found: Budget) -> dict[str, int]:
    return {line.use: line.bytes for line in found.of("host").lines if line.owner != "controller"}


def test_loading_needs_the_pieces_being_read_for_any_size() -> None:
    assert loading_bytes(EIGHT_B, "cuda") == 256 * MIB
    assert loading_bytes(replace(EIGHT_B, adapter_parameters=1_000_000), "cuda") == 256 * MIB + 4_000_000
    assert loading_bytes(EIGHT_B, "cpu") == 0, "less than an update adds to the weights"
    memory = budget(Setup(ON_EIGHT_GPUS, EIGHT_B, ASSUMED["cuda"]), ON_GPU, ALL_COPIES)
    assert uses(memory)["weights being read"] == 2 * GIB
    assert uses(memory)["copy for checkpoints"] == 96e9, "12 bytes per parameter, sharded"
    assert uses(memory)["pieces of a checkpoint"] == 8 * 512 * MIB
    apart = {"weights being read", "exported model"}
    assert memory.peak("host") == sum(line.bytes for line in memory.of("host").lines if line.use not in apart)


def test_an_offloaded_state_is_pinned_and_needs_no_copy() -> None:
    memory = budget(Setup(WORK, EIGHT_B, ASSUMED["cuda"]), OFFLOADED, ALL_COPIES)
    found = uses(memory)
    assert "copy for checkpoints" not in found
    assert found["pinned optimizer state"] == 80e9
    assert found["exported model"] == 16e9, "rank 0 collects it, beside the state"
    held = sum(line.bytes for line in memory.of("host").lines if line.use != "weights being read")
    assert memory.peak("host") == held
    two_ranks = replace(WORK, policy_ranks=2, engines=2)
    assert "snapshot to undo an update" in used(ON_GPU, work=two_ranks)
    assert "snapshot to undo an update" not in used(OFFLOADED, work=two_ranks)
    assert used(OFFLOADED, work=replace(WORK, reference_model=True))["reference model"] == 1.6 * 16e9


@pytest.mark.parametrize(("share", "pinned"), [(0.5, 40e9), (0.97, 80e9), (0.01, 80e9 * EMBEDDING)])
def test_whole_parameters_of_the_state_are_pinned(share: float, pinned: float) -> None:
    """The embedding is the last that leaves the GPU, and the head the first."""
    found = used(memory_plan(optimizer_offload=share), work=replace(WORK, reference_model=True))
    assert found["pinned optimizer state"] == pytest.approx(pinned)
    assert "reference model" not in found
    assert "copy for checkpoints" not in found


@pytest.mark.parametrize(
    ("ranks", "model", "reference", "optimizer", "expected"),
    [
        (1, EIGHT_B, False, False, 16e9),
        (1, EIGHT_B, True, False, 32e9),
        (1, EIGHT_B, True, True, 16e9),
        (8, EIGHT_B, False, False, 32e9),
        (1, replace(EIGHT_B, adapter_parameters=40_000_000), True, False, 16e9 + 80e6),
    ],
    ids=["bfloat16", "with a reference", "which is on the host", "float32 shards", "adapters"],
)
def test_weights_that_make_room_for_the_engine_are_pinned(
    ranks: int, model: ModelShape, reference: bool, optimizer: bool, expected: float
) -> None:
    pinned = "weights while the engine generates"
    work = replace(WORK, policy_ranks=ranks, engines=ranks, reference_model=reference)
    plan = memory_plan(policy_offload=True, optimizer_offload=optimizer)
    assert used(plan, model, work)[pinned] == expected
    trained = (2 if ranks == 1 else 4) * model.trained_parameters
    assert used(plan, model, work, Copies(frozen=False))[pinned] == trained, "the others are read from files again"
    assert pinned not in used(plan, model, replace(work, topology="Disaggregated"))


def test_an_export_follows_the_updates_and_takes_the_place_of_the_copy() -> None:
    job = spec(policy={"gpusPerReplica": 1})
    updating, exporting = (
        predicted(job, EIGHT_B, ON_GPU, Copies(checkpoint=copied)).peak("host") for copied in (True, False)
    )
    assert updating - exporting == 96e9 - 16e9
    adapters = replace(EIGHT_B, adapter_parameters=40_000_000)
    merged, alone = (
        uses(predicted(spec(policy={"gpusPerReplica": 1, "lora": {"export": export}}), adapters, OFFLOADED))
        for export in ("Merged", "Adapter")
    )
    assert merged["exported model"] == pytest.approx(16e9, rel=0.01)
    assert alone["exported model"] == 160e6


@pytest.mark.parametrize(
    ("given", "plan", "needed_gb"),
    [
        ({"gpusPerReplica": 1}, ON_GPU, 96),
        ({"gpusPerReplica": 1, "optimizer": {"moments": "bfloat16"}}, ON_GPU, 64),
        ({"gpusPerReplica": 1}, OFFLOADED, 96 + 80),
        ({"gpusPerReplica": 8}, ON_GPU, 96),
    ],
)
def test_a_checkpoint_is_copied_if_the_host_has_room(given: dict[str, Any], plan: MemoryPlan, needed_gb: float) -> None:
    job = spec(policy=given)
    beside = predicted(job, EIGHT_B, plan, Copies(snapshot=False, checkpoint=False))
    held = sum(line.bytes for line in beside.uses("host", "update") if "pinned" not in line.use)
    for share, copied in ((0.99, False), (1.01, True)):
        host = Hardware("cuda", 80 * GIB, int(share * (held + needed_gb * 1e9) / USABLE_HOST_SHARE))
        found = copies_with_room(Setup(workload_of(job), EIGHT_B, host), plan)
        assert (found.snapshot, found.checkpoint) == (False, copied)


def test_a_snapshot_leaves_room_for_the_copy_of_a_checkpoint() -> None:
    host = Hardware("cuda", 80 * GIB, 360 * GIB)
    found = copies_with_room(Setup(workload_of(spec(policy={"gpusPerReplica": 8})), EIGHT_B, host), ON_GPU)
    assert found == Copies(snapshot=True, checkpoint=True)


@pytest.mark.parametrize(("host_gib", "copied"), [(125, False), (160, True)])
def test_frozen_weights_are_copied_if_the_exported_model_fits_too(host_gib: int, copied: bool) -> None:
    """Otherwise the host would run out of memory in the export, after the last step."""
    model = ModelShape(32_762_000_000, 64, 5120, 8, 128, 151_936, 2, adapter_parameters=134_217_728)
    job, plan = spec(policy={"gpusPerReplica": 1, "lora": {"rank": 16}}), memory_plan(policy_offload=True)
    host = Hardware("cuda", 140 * GIB, host_gib * GIB)
    copies = copies_with_room(Setup(workload_of(job), model, host), plan)
    assert copies.frozen == copied
    assert predicted(job, model, plan, copies).peak("host") <= USABLE_HOST_SHARE * host.host_memory_bytes


SLEEPING = "weights of the sleeping engine"


def test_an_engine_that_sleeps_at_level_1_keeps_its_weights_on_the_host() -> None:
    assert used(memory_plan(rollout_sleep="Level1"))[SLEEPING] == 1.38 * 16e9
    assert SLEEPING not in used(memory_plan(rollout_sleep="Level2"))


def test_adapters_of_one_rank_and_a_kl_term_take_host_memory() -> None:
    adapted = replace(EIGHT_B, adapter_parameters=100_000_000)
    assert used(ON_GPU, adapted)["adapters as drawn"] == 400e6
    assert used(ON_GPU, adapted, replace(WORK, reference_model=True))["layers without adapters"] == int(0.3 * GIB)
    assert used(ON_GPU, adapted, ON_EIGHT_GPUS).keys().isdisjoint({"adapters as drawn", "layers without adapters"})


@pytest.mark.parametrize("work", [replace(WORK, quantized_weights=True), replace(WORK, quantized_kv_cache=True)])
def test_an_engine_in_8_bits_takes_more_host_memory(work: Workload) -> None:
    assert used(ON_GPU, work=work)["engine processes"] - used(ON_GPU)["engine processes"] == 64 * MIB


def test_processes_of_an_engine_share_its_weights_and_need_dev_shm() -> None:
    asleep, eight = memory_plan(rollout_sleep="Level1"), {"gpusPerReplica": 8}
    whole, parts = (
        predicted(spec(policy=eight, rollout={"tensorParallelSize": size}), EIGHT_B, asleep) for size in (1, 4)
    )
    assert uses(whole)[SLEEPING] == 8 * 1.38 * 16e9
    assert uses(parts)[SLEEPING] == 2 * 1.38 * 16e9
    more = uses(parts)["engine processes"] - uses(whole)["engine processes"]
    assert more == 8 * 384 * MIB, "a process for each GPU, and NCCL in it"
    assert shared_memory_bytes(parts) - shared_memory_bytes(whole) == 8 * (64 + 24) * MIB
    alone, together = (
        shared_memory_bytes(
            predicted(spec(topology="Disaggregated", rollout=eight | {"tensorParallelSize": size}), EIGHT_B, ON_GPU)
        )
        for size in (1, 4)
    )
    assert together - alone == 8 * (64 + 24) * MIB, "of the rollout pod"


@pytest.mark.parametrize(("gpus", "size"), [(8, 4), (1, 1), (0, 1)])
def test_pods_have_dev_shm_for_any_engines_that_a_plan_may_choose(gpus: int, size: int) -> None:
    auto, given = (spec(policy={"gpusPerReplica": gpus}, rollout={"tensorParallelSize": n}) for n in ("Auto", size))
    device: DeviceKind = "cuda" if gpus else "cpu"
    pods = [shared_memory_bytes(predicted_budget(job, EIGHT_B, device)) for job in (auto, given)]
    assert pods[0] == pods[1]
    beside = [beside_the_object_store_bytes(workload_of(job), device, "policy") for job in (auto, given)]
    assert beside[0] == beside[1]


@pytest.mark.parametrize(("gpus", "bucket"), [(0, "4Gi"), (0, "64Mi"), (8, "1Gi")])
def test_a_pod_of_the_predicted_size_has_room_for_the_object_store(gpus: int, bucket: str) -> None:
    rollout = {"tensorParallelSize": 4} if gpus else {}
    job = spec(policy={"gpusPerReplica": gpus}, rollout=rollout, memory={"syncBucketSize": bucket})
    device: DeviceKind = "cuda" if gpus else "cpu"
    size_bytes = shared_memory_bytes(predicted_budget(job, EIGHT_B, device))
    beside = beside_the_object_store_bytes(workload_of(job), device, "policy")
    needed = object_store_bytes(quantity_bytes(bucket), device)
    assert needed <= object_store_room(size_bytes, beside) <= needed + MIB
    assert object_store_room(size_bytes // 2, beside) < needed


def test_the_prediction_covers_a_recorded_run_and_is_not_far_off() -> None:
    """At least the recorded peak, and at most half as much again; today's prediction is the recorded one."""
    rows = json.loads((ROOT / "bench" / "results" / "host_memory.json").read_text())["rows"]
    for row in rows:
        assert 1.0 <= row["predicted"]["all"] / row["peak_pss_bytes"]["all"] <= 1.5, row["job"]
        assert row["predicted"]["checkpoint_bytes"] == pytest.approx(row["checkpoint_bytes"], rel=0.15)
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
    memory = budget(Setup(workload, shape, ASSUMED["cpu"]), plan, ALL_COPIES)
    for role, owner in (("policy", "policy"), ("rollout", "engine")):
        assert memory.of("host", owner=owner).peak("host") == rows[1]["predicted"][role]  # type: ignore[arg-type]


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
    assert shape.parameters == pytest.approx(156_096, rel=0.01)
    assert (shape.layers, shape.hidden) == (2, 64)
    assert shape_in_uri(spec(model={"uri": "random://qwen3?hidden=many"}), 4) is None
    assert shape_in_uri(spec(model={"uri": "random://qwen3?hidden=0"}), 4) is None


@pytest.mark.parametrize(
    ("name", "parameters", "layers"),
    [
        ("Qwen/Qwen3-8B", 8_190_735_360, 36),
        ("unsloth/Qwen3-8B-Base@main", 8_190_735_360, 36),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248, 32),
        ("localhost/models/smollm2-135m-instruct:1", 134_515_008, 30),
        ("org/NewQwen3-8B", 8_000_000_000, None),
        ("org/DeepSeek-R1-Distill-Qwen-7B", 7_000_000_000, None),
    ],
)
def test_well_known_models_have_their_own_shape(name: str, parameters: int, layers: int | None) -> None:
    shape = shape_of_name(name, 2)
    assert shape is not None
    assert shape.parameters == parameters
    assert layers in (None, shape.layers)


def test_the_parameters_of_known_shapes_are_those_of_their_dimensions() -> None:
    """Qwen2.5 has biases in addition, and Qwen3 norms of heads: less than a thousandth."""
    for name in _KNOWN:
        shape = shape_of_name(name, 2)
        assert shape is not None
        counts = [dense_parameters(shape, tied=tied) for tied in (True, False)]
        assert min(abs(count / shape.parameters - 1) for count in counts) < 1e-3, name


def test_a_typical_shape_is_close_to_real_ones() -> None:
    assert typical_shape(8_190_000_000, 2).hidden == pytest.approx(4096, rel=0.15)


def test_before_a_plan_the_larger_of_offload_or_not_is_predicted() -> None:
    job, shape = spec(policy={"gpusPerReplica": 1}), EIGHT_B
    both = [predicted(job, shape, plan).peak("host") for plan in (ON_GPU, OFFLOADED)]
    assert predicted_budget(job, shape, "cuda").peak("host") >= max(both)
    with_kl = {"klCoefficient": 0.1, "steps": 3}
    smaller, larger = (
        predicted_budget(spec(algorithm=with_kl, memory={"optimizerOffload": offload}), shape, "cuda")
        for offload in ("Disabled", "Enabled")
    )
    assert larger.peak("host") - smaller.peak("host") == 1.6 * 16e9, "the reference model"
    assert predicted_budget(spec(algorithm=with_kl), shape, "cuda").peak("host") == larger.peak("host")


def disk_of(job: RLJobSpec, device: DeviceKind = "cuda") -> dict[str, int]:
    return {line.use: line.bytes for line in predicted(job, EIGHT_B, ON_GPU, device=device).of("disk").lines}


def test_disk_holds_the_checkpoints_the_model_and_its_cache() -> None:
    job = spec(checkpoint={"keep": 2})
    assert checkpoint_bytes(workload_of(job), EIGHT_B) == 96e9
    assert disk_of(job) == {
        "checkpoints": 3 * 96e9,
        "trained model": 16e9,
        "model cache": 16e9,
        "compiled code": GIB,
    }
    cached = {"uri": "hf://Qwen/Qwen3-8B", "cache": {"persistentVolumeClaim": "models"}}
    assert "model cache" not in disk_of(spec(model=cached))


def test_disk_holds_the_best_model_and_exports_and_one_being_written() -> None:
    models = disk_of(spec(evaluation={"heldOut": 8, "keepBest": True}))["trained model"]
    assert models == 3 * 16e9, "the last, the best, and a better one"
    models = disk_of(spec(checkpoint={"exportEverySteps": 5, "keepExports": 4}))["trained model"]
    assert models == 6 * 16e9


def test_disk_holds_compiled_code_unless_a_claim_of_its_own_does() -> None:
    def compiled_bytes(device: DeviceKind, **cache: Any) -> int:
        model = {"uri": "hf://org/name", "cache": {"persistentVolumeClaim": "models", **cache}}
        return disk_of(spec(model=model), device).get("compiled code", 0)

    assert compiled_bytes("cuda") == GIB
    assert compiled_bytes("cuda", compiled=True) == 0
    assert compiled_bytes("cpu") == 0


def test_requests_limits_and_claims_are_round_and_cover_the_prediction() -> None:
    assert request_bytes(4 * GIB + 1) == 4 * GIB + 256 * MIB
    assert limit_bytes(4 * GIB, 0) == 8 * GIB
    assert limit_bytes(4 * GIB, 64 * GIB) == 64 * GIB, "never below the request"
    assert (claim_bytes(10 * GIB, 50 * GIB), claim_bytes(100 * GIB, 50 * GIB)) == (50 * GIB, 110 * GIB)


def test_limits_and_claims_of_the_user_that_are_too_small_are_named() -> None:
    limited = {"spec": {"containers": [{"resources": {"limits": {"memory": "8Gi"}}}]}}
    job = spec(policy={"template": limited}, checkpoint={"size": "50Gi"})
    prediction = predicted(job, EIGHT_B, ON_GPU)
    ((role, message),) = low_limits(job, prediction)
    assert (role, "found 8.00 GiB; write " in message) == ("policy", True)
    assert "write 329Gi" in (small_claim(job, EIGHT_B, prediction) or "")
    assert list(low_limits(spec(), prediction)) == []
    assert small_claim(spec(), EIGHT_B, prediction) is None
