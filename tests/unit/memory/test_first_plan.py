"""The first memory plan: pinned settings stay as they are, Auto follows from the machine, the model and the step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.memory_settings import MemorySettings
from rljob_api.topology import Topology
from rljob_memory.estimate import (
    POLICY_BESIDE_TORCH_BYTES,
    activation_bytes_per_token,
    kv_bytes,
    logprob_bytes_per_token,
    policy_state_bytes,
    policy_update_bytes,
    reference_seconds,
    sleeping_engine_bytes,
)
from rljob_memory.plan import Hardware, MemoryPlan, ModelShape, Workload, copies_frozen_weights, first_plan
from rljob_memory.sizes import GIB, MIB

AUTO = MemorySettings()
H200 = Hardware("cuda", 140 * GIB, 128 * GIB, "2.11.0")
LAPTOP = Hardware("cpu", 0, 8 * GIB, "2.13.0")
TINY = ModelShape(156_000, layers=2, hidden=64, kv_heads=2, head_dim=32, vocabulary=64, bytes_per_parameter=4)
QWEN3_0_6B = ModelShape(
    596_000_000, layers=28, hidden=1024, kv_heads=8, head_dim=128, vocabulary=151_936, bytes_per_parameter=2
)
QWEN2_7B = ModelShape(
    7_600_000_000, layers=28, hidden=3584, kv_heads=4, head_dim=128, vocabulary=152_064, bytes_per_parameter=2
)
DIGITS = Workload(8, 8, max_prompt_tokens=8, max_response_tokens=4)
SIXTEEN_GROUPS = Workload(16, 8, max_prompt_tokens=100, max_response_tokens=512)


def test_a_cpu_gets_no_gpu_settings_and_a_small_kv_cache() -> None:
    plan = first_plan(AUTO, LAPTOP, TINY, DIGITS)
    for for_gpus_only in (plan.empty_cache, plan.expandable_segments, plan.optimizer_offload):
        assert for_gpus_only is False
    assert not plan.activation_checkpointing
    assert plan.rollout_sleep_level == 0
    assert plan.kv_cache_bytes == 64 * MIB
    assert plan.micro_batch_tokens == 8 * 8 * 12, "the whole step at once"


def test_a_shared_gpu_gets_every_mitigation_that_costs_no_time() -> None:
    plan = first_plan(AUTO, H200, QWEN3_0_6B, SIXTEEN_GROUPS)
    assert plan.empty_cache
    assert plan.expandable_segments
    assert plan.detach_metrics
    assert plan.rollout_sleep_level == 2
    assert not plan.activation_checkpointing
    assert not plan.optimizer_offload
    assert plan.micro_batch_tokens == 16_384


def test_the_kv_cache_of_a_roomy_gpu_holds_all_sequences_at_their_longest() -> None:
    plan = first_plan(AUTO, H200, QWEN3_0_6B, SIXTEEN_GROUPS)
    a_token = 2 * 28 * 8 * 128 * 2  # keys and values, layers, heads, numbers, bytes: 112 KiB
    at_least = 128 * 612 * a_token
    assert at_least <= plan.kv_cache_bytes <= at_least * 1.1


def test_the_kv_cache_of_a_full_gpu_leaves_room_for_weights_and_policy() -> None:
    many = replace(SIXTEEN_GROUPS, prompts_per_step=256, max_concurrent_sequences=2048)
    plan = first_plan(AUTO, replace(H200, device_memory_bytes=24 * GIB), QWEN3_0_6B, many)
    beside = QWEN3_0_6B.weight_bytes + policy_state_bytes(QWEN3_0_6B, many, optimizer_offload=False)
    assert kv_bytes(QWEN3_0_6B, many, 1) < plan.kv_cache_bytes < 24 * GIB - beside


def test_an_engine_with_its_own_gpu_stays_awake_with_more_kv_cache() -> None:
    apart = replace(SIXTEEN_GROUPS, topology="Disaggregated")
    plan = first_plan(AUTO, H200, QWEN3_0_6B, apart)
    assert plan.rollout_sleep_level == 0
    assert not plan.empty_cache
    tight = replace(H200, device_memory_bytes=16 * GIB)
    assert (
        first_plan(AUTO, tight, QWEN3_0_6B, apart).kv_cache_bytes
        > first_plan(AUTO, tight, QWEN3_0_6B, SIXTEEN_GROUPS).kv_cache_bytes
    )


def test_an_engine_on_two_gpus_has_more_kv_cache_for_weights_that_fill_one() -> None:
    qwen3_14b = ModelShape(14_770_000_000, 40, 5120, 8, 128, 151_936, 2, heads=40, intermediate=17_408)
    long = replace(SIXTEEN_GROUPS, prompts_per_step=256, max_response_tokens=16_384, topology="Disaggregated")
    four = Hardware("cuda", 48 * GIB, 500 * GIB, "2.11.0")

    def sequences_at_once(size: int) -> int:
        work = replace(long, policy_ranks=4, engines=4 // size, tensor_parallel_size=size)
        return work.engines * (first_plan(AUTO, four, qwen3_14b, work).kv_cache_bytes // kv_bytes(qwen3_14b, work, 1))

    assert [sequences_at_once(size) for size in (1, 2, 4)] == sorted({sequences_at_once(size) for size in (1, 2, 4)})
    assert sequences_at_once(2) > 1.5 * sequences_at_once(1)


def test_processes_of_one_engine_share_the_memory_of_the_host() -> None:
    host = Hardware("cpu", 0, GIB, "2.13.0")
    apart = replace(SIXTEEN_GROUPS, topology="Disaggregated", max_concurrent_sequences=256)
    alone, two = (
        first_plan(AUTO, host, QWEN3_0_6B, replace(apart, tensor_parallel_size=size)).kv_cache_bytes for size in (1, 2)
    )
    assert two <= alone // 2 + (1 << 20)


def test_a_large_model_on_one_gpu_offloads_and_checkpoints() -> None:
    eighty = Hardware("cuda", 80 * GIB, 500 * GIB, "2.11.0")
    alone = first_plan(AUTO, eighty, QWEN2_7B, SIXTEEN_GROUPS)
    assert alone.optimizer_offload
    sharded = first_plan(AUTO, eighty, QWEN2_7B, replace(SIXTEEN_GROUPS, policy_ranks=8, engines=8))
    assert not sharded.optimizer_offload
    assert not sharded.activation_checkpointing
    small_host = first_plan(AUTO, replace(eighty, host_memory_bytes=32 * GIB), QWEN2_7B, SIXTEEN_GROUPS)
    assert not small_host.optimizer_offload, "the host could not hold it"


def test_adapters_of_a_large_model_on_one_gpu_need_no_offload() -> None:
    qwen3_32b = ModelShape(32_760_000_000, 64, 5120, 8, 128, 151_936, 2, adapter_parameters=134_000_000)
    plan = first_plan(AUTO, replace(H200, host_memory_bytes=512 * GIB), qwen3_32b, SIXTEEN_GROUPS)
    assert not plan.optimizer_offload
    assert plan.micro_batch_tokens >= SIXTEEN_GROUPS.max_sequence_tokens
    eighty = Hardware("cuda", 80 * GIB, 500 * GIB, "2.11.0")
    adapted = replace(QWEN2_7B, adapter_parameters=40_000_000)
    kept, trained = (first_plan(AUTO, eighty, model, SIXTEEN_GROUPS) for model in (QWEN2_7B, adapted))
    assert kept.optimizer_offload
    assert not trained.optimizer_offload
    assert trained.kv_cache_bytes >= kept.kv_cache_bytes
    assert trained.micro_batch_tokens > kept.micro_batch_tokens


def test_8b_trains_on_one_gpu_of_80_gib_and_14b_on_one_h200() -> None:
    """8B with the state in host memory, and all activations kept. 14B needs moments in bfloat16 for the host."""
    host = 125 * GIB
    qwen3_8b = ModelShape(8_190_000_000, 36, 4096, 8, 128, 151_936, 2, heads=32, intermediate=12_288)
    step = Workload(16, 8, max_prompt_tokens=16, max_response_tokens=1024)
    for gpu_bytes, least_tokens in ((79 * GIB, 2 * 1040), (140 * GIB, 8_192)):
        plan = first_plan(AUTO, Hardware("cuda", gpu_bytes, host, "2.11.0"), qwen3_8b, step, fused=True)
        assert plan.optimizer_offload
        assert not plan.activation_checkpointing
        assert plan.micro_batch_tokens >= least_tokens
        assert plan.kv_cache_bytes >= kv_bytes(qwen3_8b, step, 128)
    qwen3_14b = ModelShape(14_770_000_000, 40, 5120, 8, 128, 151_936, 2, heads=40, intermediate=17_408)
    halved = replace(step, moment_bytes=2)
    plan = first_plan(AUTO, Hardware("cuda", 140 * GIB, host, "2.11.0"), qwen3_14b, halved, fused=True)
    assert plan.optimizer_offload
    assert plan.micro_batch_tokens > step.max_sequence_tokens


def test_a_reference_model_on_the_host_passes_the_gpu_in_each_micro_batch() -> None:
    model = ModelShape(8_190_000_000, 36, 4096, 8, 128, 151_936, 2, heads=32, intermediate=12_288)
    step = Workload(16, 8, max_prompt_tokens=16, max_response_tokens=1024)
    assert reference_seconds(model, step, 16) == 0
    with_reference = replace(step, reference_model=True)
    assert reference_seconds(model, with_reference, 16) == pytest.approx(16 * 16.38e9 / 40e9)
    assert reference_seconds(model, replace(with_reference, policy_ranks=4), 16) == pytest.approx(4 * 16.38e9 / 40e9)
    adapted = replace(model, adapter_parameters=44_000_000)
    assert reference_seconds(adapted, with_reference, 16) == 0, "the frozen weights are the reference"


QWEN3_32B_ADAPTED = ModelShape(
    32_762_000_000, 64, 5120, 8, 128, 151_936, 2, heads=64, intermediate=25_600, adapter_parameters=134_217_728
)
QWEN3_8B_ADAPTED = ModelShape(
    8_190_000_000, 36, 4096, 8, 128, 151_936, 2, heads=32, intermediate=12_288, adapter_parameters=43_646_976
)
LONG_STEP = Workload(16, 8, max_prompt_tokens=16, max_response_tokens=1024)


@pytest.mark.parametrize(
    ("model", "gpu_gib", "most"), [(QWEN3_32B_ADAPTED, 139.8, 128), (QWEN3_8B_ADAPTED, 40, 98)], ids=["32B", "8B"]
)
@pytest.mark.parametrize("host_gib", [16, 60, 500])
def test_the_policys_weights_make_room_for_the_kv_cache(
    model: ModelShape, gpu_gib: float, most: int, host_gib: int
) -> None:
    """The weights of policy and engine fit together, but not beside more than one sequence."""
    hardware = Hardware("cuda", int(gpu_gib * GIB), host_gib * GIB, "2.11.0")
    plan = first_plan(AUTO, hardware, model, LONG_STEP, fused=True)
    assert plan.policy_offload
    assert kv_bytes(model, LONG_STEP, most) <= plan.kv_cache_bytes < kv_bytes(model, LONG_STEP, most + 1)
    assert copies_frozen_weights(hardware, model, LONG_STEP, plan) == (host_gib * 0.9 * GIB > model.weight_bytes + GIB)
    kept = first_plan(MemorySettings(policy_offload="Disabled"), hardware, model, LONG_STEP, fused=True)
    assert not kept.policy_offload
    assert kept.kv_cache_bytes < kv_bytes(model, LONG_STEP, 2)


def test_the_policys_weights_stay_where_that_gains_nothing() -> None:
    def offloads(
        model: ModelShape, gpu_gib: float, step: Workload = LONG_STEP, host_gib: int = 500, **settings: Any
    ) -> bool:
        hardware = Hardware("cuda", int(gpu_gib * GIB), host_gib * GIB, "2.11.0")
        return first_plan(MemorySettings(**settings), hardware, model, step, fused=True).policy_offload

    assert not offloads(QWEN3_8B_ADAPTED, 139.8), "all sequences fit beside them"
    assert not offloads(QWEN3_8B_ADAPTED, 40, rollout_sleep="Disabled"), "the engine is beside them in an update, too"
    assert not offloads(QWEN3_8B_ADAPTED, 40, replace(LONG_STEP, topology="Disaggregated"))
    assert not offloads(QWEN3_32B_ADAPTED, 120), "both copies of the weights do not fit in a sync"
    four = ModelShape(4_020_000_000, 36, 2560, 8, 128, 151_936, 2, heads=32, intermediate=9728)
    longer = replace(LONG_STEP, max_prompt_tokens=512)
    assert offloads(four, 47.5, longer), "weights that are trained"
    assert not offloads(four, 47.5, longer, 48, optimizer_offload="Enabled"), "the host holds no more than its state"
    with_reference = replace(longer, max_response_tokens=2048, reference_model=True)
    assert offloads(four, 34.5, with_reference, 60, optimizer_offload="Enabled")
    assert not offloads(four, 34.5, with_reference, 55, optimizer_offload="Enabled"), "its reference is on the host"


def test_offloading_beside_an_engine_that_stays_awake_gives_no_room() -> None:
    gpu = Hardware("cuda", 52 * GIB, 500 * GIB, "2.11.0")
    apart = replace(LONG_STEP, topology="Disaggregated")
    beside: dict[str, Any] = {"rollout_sleep": "Disabled"}
    for step, settings in ((LONG_STEP, beside), (apart, {})):
        pinned, without = (
            first_plan(MemorySettings(policy_offload=offload, **settings), gpu, QWEN3_8B_ADAPTED, step)
            for offload in ("Enabled", "Disabled")
        )
        assert pinned.policy_offload
        assert pinned == without.model_copy(update={"policy_offload": True})


def test_activations_are_checkpointed_if_one_sequence_does_not_fit() -> None:
    long = replace(SIXTEEN_GROUPS, max_response_tokens=32_768, policy_ranks=8, engines=8)
    eighty = Hardware("cuda", 80 * GIB, 500 * GIB, "2.11.0")
    assert first_plan(AUTO, eighty, QWEN2_7B, long).activation_checkpointing


def test_an_engine_that_stays_awake_takes_room_from_the_update() -> None:
    gpu = replace(H200, device_memory_bytes=40 * GIB)
    asleep = first_plan(AUTO, gpu, QWEN3_0_6B, SIXTEEN_GROUPS)
    awake = first_plan(MemorySettings(rollout_sleep="Disabled"), gpu, QWEN3_0_6B, SIXTEEN_GROUPS)
    assert awake.rollout_sleep_level == 0
    assert awake.micro_batch_tokens < asleep.micro_batch_tokens


def test_chunks_of_the_head_grow_with_the_room_to_a_gibibyte() -> None:
    chunks = {
        size: first_plan(AUTO, replace(H200, device_memory_bytes=size * GIB), QWEN3_0_6B, SIXTEEN_GROUPS, fused=True)
        for size in (16, 24, 140)
    }
    assert {size: plan.logprob_chunk_tokens for size, plan in chunks.items()} == {16: 640, 24: 832, 140: 1728}


@pytest.mark.parametrize("fused", [True, False], ids=["compiled", "not compiled"])
@pytest.mark.parametrize("topology", get_args(Topology))
@pytest.mark.parametrize("gpu_gib", [16, 24, 40, 80, 140])
def test_an_update_fits_if_one_sequence_does(gpu_gib: int, topology: Topology, fused: bool) -> None:
    """By the estimates, whose sum is the peak that recovery expects. For 0.6B, 8B, 14B, and 32B with adapters."""
    qwen3_0_6b = replace(QWEN3_0_6B, heads=16, intermediate=3072)
    qwen3_14b = ModelShape(14_770_000_000, 40, 5120, 8, 128, 151_936, 2, heads=40, intermediate=17_408)
    qwen3_8b = replace(QWEN3_8B_ADAPTED, adapter_parameters=0)
    models = (qwen3_0_6b, qwen3_8b, qwen3_14b, QWEN3_32B_ADAPTED)
    fitting = 0
    for model, ranks, response in product(models, (1, 2, 4, 8), (256, 2048)):
        work = Workload(16, 8, 512, response, policy_ranks=ranks, engines=ranks, topology=topology)
        hardware = Hardware("cuda", gpu_gib * GIB, ranks * 250 * GIB, "2.11.0")
        plan = first_plan(AUTO, hardware, model, work, fused=fused)
        state = policy_state_bytes(model, work, optimizer_offload=plan.optimizer_offload) + POLICY_BESIDE_TORCH_BYTES
        state += policy_update_bytes(model, work) + (sleeping_engine_bytes(work) if topology == "Colocated" else 0)
        a_token = activation_bytes_per_token(model, checkpointing=plan.activation_checkpointing, fused=fused)
        chunk = plan.logprob_chunk_tokens * logprob_bytes_per_token(model, fused=fused)
        if plan.micro_batch_tokens > work.max_sequence_tokens:
            fitting += 1
            assert state + plan.micro_batch_tokens * a_token + chunk <= 0.9 * hardware.device_memory_bytes
    assert fitting or gpu_gib < 40


def test_the_sync_bucket_holds_the_largest_parameter() -> None:
    assert first_plan(AUTO, LAPTOP, TINY, DIGITS).sync_bucket_bytes == 256 * MIB
    bucket = first_plan(AUTO, H200, QWEN3_0_6B, SIXTEEN_GROUPS).sync_bucket_bytes
    assert 151_936 * 1024 * 2 <= bucket <= GIB


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"emptyCache": "Disabled"}, {"empty_cache": False}),
        ({"expandableSegments": "Disabled"}, {"expandable_segments": False}),
        ({"rolloutSleep": "Level1"}, {"rollout_sleep": "Level1"}),
        ({"kvCache": "3Gi"}, {"kv_cache_bytes": 3 * GIB}),
        ({"microBatchTokens": 99}, {"micro_batch_tokens": 99}),
        ({"logprobChunkTokens": 7}, {"logprob_chunk_tokens": 7}),
        ({"activationCheckpointing": "Enabled"}, {"activation_checkpointing": True}),
        ({"optimizerOffload": "Enabled"}, {"optimizer_offload": True}),
        ({"policyOffload": "Enabled"}, {"policy_offload": True}),
        ({"syncBucketSize": "128Mi"}, {"sync_bucket_bytes": 128 * MIB}),
        ({"detachMetrics": "Disabled"}, {"detach_metrics": False}),
        ({"weightExport": "ReservedBuffer"}, {"weight_export": "ReservedBuffer"}),
    ],
)
def test_a_pinned_setting_is_used_unchanged(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    plan = first_plan(MemorySettings.model_validate(settings), H200, QWEN3_0_6B, SIXTEEN_GROUPS)
    assert plan.model_dump(include=set(expected)) == expected


def test_activation_checkpointing_makes_room_for_larger_micro_batches() -> None:
    gpu = Hardware("cuda", 24 * GIB, 64 * GIB, "2.11.0")
    kept = first_plan(AUTO, gpu, QWEN3_0_6B, SIXTEEN_GROUPS)
    again = first_plan(MemorySettings(activation_checkpointing="Enabled"), gpu, QWEN3_0_6B, SIXTEEN_GROUPS)
    assert again.micro_batch_tokens > kept.micro_batch_tokens


def test_a_plan_survives_a_json_round_trip() -> None:
    plan = first_plan(AUTO, H200, QWEN3_0_6B, SIXTEEN_GROUPS)
    assert MemoryPlan.model_validate_json(plan.model_dump_json(by_alias=True)) == plan
    assert '"kvCache":' in plan.model_dump_json(by_alias=True)


shapes = st.builds(
    ModelShape,
    parameters=st.integers(10_000, 80_000_000_000),
    layers=st.integers(1, 80),
    hidden=st.integers(16, 8192),
    kv_heads=st.integers(1, 16),
    head_dim=st.integers(16, 256),
    vocabulary=st.integers(16, 260_000),
    bytes_per_parameter=st.sampled_from([2, 4]),
)
machines = st.one_of(
    st.builds(Hardware, st.just("cpu"), st.just(0), st.integers(GIB, 512 * GIB), st.just("2.13.0")),
    st.builds(
        Hardware, st.just("cuda"), st.integers(4 * GIB, 192 * GIB), st.integers(8 * GIB, 2048 * GIB), st.just("2.11.0")
    ),
)
workloads = st.builds(
    Workload,
    prompts_per_step=st.integers(1, 1024),
    group_size=st.integers(2, 64),
    max_prompt_tokens=st.integers(1, 32_768),
    max_response_tokens=st.integers(1, 32_768),
    max_concurrent_sequences=st.integers(1, 512),
    policy_ranks=st.integers(1, 64),
    engines=st.integers(1, 64),
    tensor_parallel_size=st.sampled_from([1, 2, 4]),
    reference_model=st.booleans(),
    topology=st.sampled_from(["Colocated", "Disaggregated"]),
)


@given(machines, shapes, workloads)
def test_any_machine_gets_a_plan_that_fits_one_sequence(
    hardware: Hardware, model: ModelShape, workload: Workload
) -> None:
    plan = first_plan(AUTO, hardware, model, workload)
    assert plan.generation == 1
    assert plan.micro_batch_tokens >= workload.max_sequence_tokens
    assert plan.kv_cache_bytes >= kv_bytes(model, workload, 1)
    assert plan.kv_cache_bytes <= max(kv_bytes(model, workload, workload.sequences_per_engine), 64 * MIB) + MIB
    assert plan.logprob_chunk_tokens * model.vocabulary * 4 <= (GIB if hardware.device == "cuda" else 256 * MIB)
    assert plan.sync_bucket_bytes >= model.largest_parameter_bytes


@given(machines, shapes, workloads)
def test_more_memory_never_shrinks_micro_batches_or_kv_cache(
    hardware: Hardware, model: ModelShape, workload: Workload
) -> None:
    pinned = MemorySettings(
        optimizer_offload="Disabled", policy_offload="Disabled", activation_checkpointing="Disabled"
    )
    larger = replace(
        hardware,
        device_memory_bytes=2 * hardware.device_memory_bytes,
        host_memory_bytes=2 * hardware.host_memory_bytes,
    )
    before, after = (first_plan(pinned, machine, model, workload) for machine in (hardware, larger))
    assert after.micro_batch_tokens >= before.micro_batch_tokens
    assert after.kv_cache_bytes >= before.kv_cache_bytes
