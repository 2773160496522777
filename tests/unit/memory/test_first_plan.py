"""The first memory plan: pinned settings stay as they are, Auto follows from the machine, the model and the step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rljob_api.memory_plan import MemoryPlan, MemorySettings
from rljob_api.topology import Topology
from rljob_memory.budget import PHASES, Setup, budget, compiles_ahead, copies_with_room
from rljob_memory.budget.gpu import PolicyState, kv_bytes
from rljob_memory.engine_sizes import engine_sizes
from rljob_memory.hardware import Hardware
from rljob_memory.model_shape import ModelShape
from rljob_memory.plan import best_choice, first_plan
from rljob_memory.plan_settings import texts_of
from rljob_memory.sizes import GIB, MIB
from rljob_memory.workload import Workload
from rljob_testing.memory_plans import QWEN3_4B, QWEN3_8B, QWEN3_14B, QWEN3_32B

LAPTOP = Hardware("cpu", 0, 8 * GIB)


def gpu(device_gib: float, host_gib: float = 500) -> Hardware:
    return Hardware("cuda", int(device_gib * GIB), int(host_gib * GIB))


H200 = gpu(140, 128)
TINY = ModelShape(156_000, layers=2, hidden=64, kv_heads=2, head_dim=32, vocabulary=64, bytes_per_parameter=4)
QWEN3_0_6B = ModelShape(596_000_000, 28, 1024, 8, 128, 151_936, 2)
QWEN2_7B = ModelShape(7_600_000_000, 28, 3584, 4, 128, 152_064, 2)
ADAPTED_7B = replace(QWEN2_7B, adapter_parameters=40_000_000)
ADAPTED_8B = replace(QWEN3_8B, adapter_parameters=43_646_976)
ADAPTED_32B = replace(QWEN3_32B, adapter_parameters=134_217_728)

DIGITS = Workload(8, 8, max_prompt_tokens=8, max_response_tokens=4)
SIXTEEN_GROUPS = Workload(16, 8, max_prompt_tokens=100, max_response_tokens=512)
LONG_STEP = Workload(16, 8, max_prompt_tokens=16, max_response_tokens=1024)
APART_LONG = replace(LONG_STEP, topology="Disaggregated")
APART = replace(SIXTEEN_GROUPS, topology="Disaggregated")
EIGHT_RANKS = replace(SIXTEEN_GROUPS, policy_ranks=8, engines=8)


def planned(
    hardware: Hardware, model: ModelShape, work: Workload = SIXTEEN_GROUPS, *, fused: bool = False, **settings: Any
) -> MemoryPlan:
    setup = Setup(work, model, replace(hardware, layers_compiled=fused))
    return first_plan(MemorySettings.model_validate(settings), setup)


ON_H200 = planned(H200, QWEN3_0_6B)


@pytest.mark.parametrize(
    ("hardware", "model", "work", "expected"),
    [
        (
            LAPTOP,
            TINY,
            DIGITS,
            {
                **dict.fromkeys(["empty_cache", "expandable_segments", "optimizer_offload"], False),
                "activation_checkpointing": False,
                "rollout_sleep": "Disabled",
                "kv_cache_bytes": 64 * MIB,
                "micro_batch_tokens": 8 * 8 * 12,  # the whole step at once
                "sync_bucket_bytes": 256 * MIB,
            },
        ),
        # nothing is released on a shared GPU where everything fits at once
        (
            H200,
            QWEN3_0_6B,
            SIXTEEN_GROUPS,
            {
                **dict.fromkeys(["expandable_segments", "detach_metrics"], True),
                **dict.fromkeys(["empty_cache", "activation_checkpointing", "optimizer_offload"], False),
                "rollout_sleep": "Disabled",
                "weight_export": "ReservedBuffer",
                "micro_batch_tokens": 16_384,
            },
        ),
        (
            H200,
            QWEN3_14B,
            SIXTEEN_GROUPS,
            {"empty_cache": True, "rollout_sleep": "Level2", "weight_export": "SwitchSegments"},
        ),
        (H200, QWEN3_0_6B, APART, {"rollout_sleep": "Disabled", "empty_cache": False}),
        # a large model on one GPU, on eight, and on a host that could not hold its state
        (gpu(80), QWEN2_7B, SIXTEEN_GROUPS, {"optimizer_offload": True}),
        (gpu(80), QWEN2_7B, EIGHT_RANKS, {"optimizer_offload": False, "activation_checkpointing": False}),
        (gpu(80, 32), QWEN2_7B, SIXTEEN_GROUPS, {"optimizer_offload": False}),
        # one long sequence does not fit
        (gpu(80), QWEN2_7B, replace(EIGHT_RANKS, max_response_tokens=32_768), {"activation_checkpointing": True}),
        # adapters need no offload
        (gpu(140, 512), ADAPTED_32B, SIXTEEN_GROUPS, {"optimizer_offload": False}),
        (gpu(80), ADAPTED_7B, SIXTEEN_GROUPS, {"optimizer_offload": False}),
    ],
)
def test_settings_follow_from_machine_model_and_step(
    hardware: Hardware, model: ModelShape, work: Workload, expected: dict[str, Any]
) -> None:
    plan = planned(hardware, model, work)
    assert plan.model_dump(include=set(expected)) == expected


@pytest.mark.parametrize(("gib", "sleep"), [(140, "Disabled"), (54, "Disabled"), (52, "Level2"), (24, "Level2")])
def test_an_engine_stays_awake_if_four_fifths_of_the_gpu_hold_everything(gib: int, sleep: str) -> None:
    def budgeted(**settings: str) -> tuple[MemoryPlan, int]:
        setup = Setup(SIXTEEN_GROUPS, QWEN3_0_6B, replace(gpu(gib), layers_compiled=True))
        choice = best_choice(MemorySettings.model_validate(settings), setup)
        return choice.plan, max(choice.budget.total("gpu", phase) for phase in PHASES)

    awake, at_once = budgeted(rolloutSleep="Disabled")
    assert not awake.empty_cache
    plan, _ = budgeted()
    assert plan.rollout_sleep == sleep
    assert plan.empty_cache == (sleep == "Level2")
    if gib > 24:  # below, it would also get smaller micro-batches
        assert (at_once <= 0.8 * gib * GIB) == (sleep == "Disabled")


PINNED: dict[str, Any] = {
    "emptyCache": "Disabled",
    "expandableSegments": "Disabled",
    "rolloutSleep": "Level1",
    "kvCache": "3Gi",
    "microBatchTokens": 99,
    "logprobChunkTokens": 7,
    "activationCheckpointing": "Enabled",
    "optimizerOffload": "Enabled",
    "policyOffload": "Enabled",
    "syncBucketSize": "128Mi",
    "detachMetrics": "Disabled",
    "weightExport": "ReservedBuffer",
}


@pytest.mark.parametrize("setting", PINNED)
def test_a_pinned_setting_is_used_unchanged(setting: str) -> None:
    plan = planned(H200, QWEN3_0_6B, **{setting: PINNED[setting]})
    assert texts_of(plan)[setting] == str(PINNED[setting])


# --- sizes ---


def test_the_kv_cache_of_a_roomy_gpu_holds_all_sequences_at_their_longest() -> None:
    a_token = 2 * 28 * 8 * 128 * 2  # keys and values, layers, heads, numbers, bytes: 112 KiB
    at_least = 128 * 612 * a_token
    assert at_least <= ON_H200.kv_cache_bytes <= at_least * 1.1
    assert 151_936 * 1024 * 2 <= ON_H200.sync_bucket_bytes <= GIB, "the largest parameter"


def test_the_kv_cache_of_a_full_gpu_leaves_room_for_weights_and_policy() -> None:
    many = replace(SIXTEEN_GROUPS, prompts_per_step=256, max_concurrent_sequences=2048)
    beside = QWEN3_0_6B.weight_bytes + PolicyState(many, QWEN3_0_6B).changed
    assert kv_bytes(many, QWEN3_0_6B, 1) < planned(gpu(24, 128), QWEN3_0_6B, many).kv_cache_bytes < 24 * GIB - beside


def test_an_engine_of_its_own_gets_the_whole_gpu() -> None:
    tight = gpu(12, 128)
    assert planned(tight, QWEN3_0_6B, APART).kv_cache_bytes > planned(tight, QWEN3_0_6B).kv_cache_bytes
    busy = replace(APART, prompts_per_step=512, group_size=16, max_response_tokens=16_000)
    plan = planned(H200, QWEN3_0_6B, busy)
    assert plan.kv_cache_bytes + QWEN3_0_6B.weight_bytes > 0.8 * H200.device_memory_bytes
    small = planned(replace(H200, engine_device_memory_bytes=24 * GIB), QWEN3_0_6B, busy)
    assert small.kv_cache_bytes < 24 * GIB
    assert small.micro_batch_tokens == plan.micro_batch_tokens, "the policy's GPU is the same"


def test_an_engine_on_two_gpus_has_more_kv_cache_for_weights_that_fill_one() -> None:
    long = replace(APART, prompts_per_step=256, max_response_tokens=16_384, policy_ranks=4)
    at_once = []
    for size in (1, 2, 4):
        work = replace(long, engines=4 // size, tensor_parallel_size=size)
        kv_cache = planned(gpu(48), QWEN3_14B, work).kv_cache_bytes
        at_once.append(work.engines * (kv_cache // kv_bytes(work, QWEN3_14B, 1)))
    assert at_once == sorted(set(at_once))
    assert at_once[1] > 1.5 * at_once[0]


def test_processes_of_one_engine_share_the_memory_of_the_host() -> None:
    apart = replace(APART, max_concurrent_sequences=256)
    alone, two = (
        planned(Hardware("cpu", 0, GIB), QWEN3_0_6B, replace(apart, tensor_parallel_size=size)).kv_cache_bytes
        for size in (1, 2)
    )
    assert two <= alone // 2 + MIB


def test_adapters_leave_more_room() -> None:
    trained, adapted = (planned(gpu(80), model) for model in (QWEN2_7B, ADAPTED_7B))
    assert adapted.kv_cache_bytes >= trained.kv_cache_bytes
    assert adapted.micro_batch_tokens > trained.micro_batch_tokens


@pytest.mark.parametrize(
    ("model", "gpu_gib", "moment_bytes", "least_tokens"),
    [(QWEN3_8B, 79, 4, 2 * 1040), (QWEN3_8B, 140, 4, 7 * 1040), (QWEN3_14B, 140, 2, 1041)],
)
def test_8b_trains_on_one_gpu_of_80_gib_and_14b_on_one_h200(
    model: ModelShape, gpu_gib: int, moment_bytes: int, least_tokens: int
) -> None:
    """With state in host memory, and all activations kept. 14B needs moments in bfloat16 for the host."""
    step = replace(LONG_STEP, moment_bytes=moment_bytes)
    plan = planned(gpu(gpu_gib, 125), model, step, fused=True)
    assert plan.optimizer_offload
    assert plan.micro_batch_tokens >= least_tokens
    assert not plan.activation_checkpointing
    assert plan.kv_cache_bytes >= kv_bytes(step, model, 128)


@pytest.mark.parametrize(
    ("model", "step", "device_gib", "least", "most"),
    [
        (QWEN3_8B, LONG_STEP, 139.8, 0.4, 0.6),
        (QWEN3_8B, LONG_STEP, 79.1, 1, 1),
        (QWEN3_4B, LONG_STEP, 139.8, 0, 0),
        (QWEN3_4B, LONG_STEP, 79.1, 0.2, 0.5),
        (QWEN3_8B, replace(LONG_STEP, reference_model=True), 139.8, 0.4, 0.7),
        (QWEN3_8B, replace(LONG_STEP, max_response_tokens=4096), 139.8, 0.6, 0.9),
    ],
    ids=["8B", "8B on 80 GB", "4B", "4B on 80 GB", "8B with a reference model", "8B with long responses"],
)
def test_state_that_fits_stays_on_the_gpu(
    model: ModelShape, step: Workload, device_gib: float, least: float, most: float
) -> None:
    setup = Setup(step, model, replace(gpu(device_gib, 512), layers_compiled=True))
    found = best_choice(MemorySettings(), setup)
    assert found.fits
    assert least <= found.plan.optimizer_offload <= most
    assert not found.plan.activation_checkpointing
    streamed = best_choice(MemorySettings(optimizer_offload="Enabled"), setup)
    if 0 < found.plan.optimizer_offload < 1:
        more = found.plan.model_copy(update={"optimizer_offload": found.plan.optimizer_offload - 0.01})
        assert setup.missing_bytes(budget(setup, more)), "no more of it fits"
        assert found.budget.seconds() < streamed.budget.seconds()
    if (model, step, device_gib) == (QWEN3_8B, LONG_STEP, 139.8):
        assert streamed.budget.seconds() - found.budget.seconds() > 0.8


@pytest.mark.parametrize(("written", "share"), [("Disabled", 0), ("1%", 0.01), ("29%", 0.29), ("Enabled", 1)])
def test_a_pinned_share_is_kept(written: str, share: float) -> None:
    plan = planned(gpu(139.8), QWEN3_8B, LONG_STEP, optimizerOffload=written)
    assert plan.optimizer_offload == share
    assert texts_of(plan)["optimizerOffload"] == written


def test_plans_of_earlier_versions_have_a_switch() -> None:
    for switch in (True, False):
        former = ON_H200.model_dump(by_alias=True, mode="json") | {"optimizerOffload": switch}
        assert MemoryPlan.model_validate(former).optimizer_offload == float(switch)


@pytest.mark.parametrize("wrong", ["0%", "100%", "50", "5.5%", "half", "150%"])
def test_other_shares_are_refused(wrong: str) -> None:
    with pytest.raises(ValidationError, match="a percentage such as 50%"):
        MemorySettings.model_validate({"optimizerOffload": wrong})


def test_checkpointing_and_sleep_make_room_for_larger_micro_batches() -> None:
    def tokens(gib: int, **settings: Any) -> int:
        return planned(gpu(gib, 128), QWEN3_0_6B, **settings).micro_batch_tokens

    assert tokens(24, activationCheckpointing="Enabled") > tokens(24)
    assert tokens(40, rolloutSleep="Disabled") < tokens(40)


@pytest.mark.parametrize(("gpu_gib", "tokens"), [(16, 896), (24, 1024), (140, 1728)])
def test_chunks_of_the_head_grow_with_the_room_to_a_gibibyte(gpu_gib: int, tokens: int) -> None:
    assert planned(gpu(gpu_gib, 128), QWEN3_0_6B, fused=True).logprob_chunk_tokens == tokens


@pytest.mark.parametrize("fused", [True, False], ids=["compiled", "not compiled"])
@pytest.mark.parametrize("topology", get_args(Topology))
@pytest.mark.parametrize("gpu_gib", [16, 24, 40, 80, 140])
def test_an_update_fits_if_one_sequence_does(gpu_gib: int, topology: Topology, fused: bool) -> None:
    """By the estimates, whose sum is the peak that recovery expects. For 0.6B, 8B, 14B, and 32B with adapters."""
    models = (replace(QWEN3_0_6B, heads=16, intermediate=3072), QWEN3_8B, QWEN3_14B, ADAPTED_32B)
    fitting = 0
    for model, ranks, response in product(models, (1, 2, 4, 8), (256, 2048)):
        work = Workload(16, 8, 512, response, policy_ranks=ranks, engines=ranks, topology=topology)
        setup = Setup(work, model, replace(gpu(gpu_gib, ranks * 250), layers_compiled=fused))
        plan = first_plan(MemorySettings(), setup)
        if plan.micro_batch_tokens > work.max_sequence_tokens:
            fitting += 1
            assert budget(setup, plan).peak("gpu", "update") <= 0.9 * gpu_gib * GIB
    assert fitting or gpu_gib < 40


# --- the policy's weights make room for the KV cache ---


@pytest.mark.parametrize(
    ("model", "gpu_gib", "most"), [(ADAPTED_32B, 139.8, 128), (ADAPTED_8B, 40, 106)], ids=["32B", "8B"]
)
@pytest.mark.parametrize("host_gib", [16, 60, 500])
def test_the_policys_weights_make_room_for_the_kv_cache(
    model: ModelShape, gpu_gib: float, most: int, host_gib: int
) -> None:
    """The weights of policy and engine fit together, but not beside more than one sequence."""
    hardware = gpu(gpu_gib, host_gib)
    plan = planned(hardware, model, LONG_STEP, fused=True)
    assert plan.policy_offload
    assert kv_bytes(LONG_STEP, model, most) <= plan.kv_cache_bytes < kv_bytes(LONG_STEP, model, most + 1)
    holds_frozen = host_gib * 0.95 * GIB > 2 * model.weight_bytes + 6 * GIB  # the exported model comes on top
    assert copies_with_room(Setup(LONG_STEP, model, hardware), plan).frozen == holds_frozen
    kept = planned(hardware, model, LONG_STEP, fused=True, policyOffload="Disabled")
    assert not kept.policy_offload
    assert kept.kv_cache_bytes < plan.kv_cache_bytes / 20


LONGER = replace(LONG_STEP, max_prompt_tokens=512)
WITH_REFERENCE = replace(LONGER, max_response_tokens=2048, reference_model=True)


@pytest.mark.parametrize(
    ("model", "gpu_gib", "host_gib", "step", "settings", "is_offloaded"),
    [
        (ADAPTED_8B, 139.8, 500, LONG_STEP, {}, False),  # all sequences fit beside them
        (ADAPTED_8B, 40, 500, LONG_STEP, {"rolloutSleep": "Disabled"}, False),  # the engine is there in an update
        (ADAPTED_8B, 40, 500, APART_LONG, {}, False),
        (ADAPTED_32B, 120, 500, LONG_STEP, {}, False),  # both copies do not fit in a sync
        (QWEN3_4B, 47.5, 500, LONGER, {}, True),  # weights that are trained
        (QWEN3_4B, 47.5, 48, LONGER, {"optimizerOffload": "Enabled"}, False),  # the host holds no more than its state
        (QWEN3_4B, 33, 75, WITH_REFERENCE, {"optimizerOffload": "Enabled"}, True),
        (QWEN3_4B, 33, 73, WITH_REFERENCE, {"optimizerOffload": "Enabled"}, False),  # nor reference and exported model
    ],
)
def test_weights_are_not_offloaded_if_that_gains_nothing(
    model: ModelShape, gpu_gib: float, host_gib: int, step: Workload, settings: dict[str, Any], is_offloaded: bool
) -> None:
    assert planned(gpu(gpu_gib, host_gib), model, step, fused=True, **settings).policy_offload == is_offloaded


@pytest.mark.parametrize(
    ("step", "settings"),
    [(LONG_STEP, {"rolloutSleep": "Disabled"}), (APART_LONG, {})],
)
def test_offloading_beside_an_engine_that_stays_awake_gives_no_room(step: Workload, settings: dict[str, Any]) -> None:
    pinned, without = (
        planned(gpu(52), ADAPTED_8B, step, policyOffload=offload, **settings) for offload in ("Enabled", "Disabled")
    )
    assert pinned == without.model_copy(update={"policy_offload": True})


# --- copies of the state of several ranks, and compilation while the engine starts, if there is room ---

TWO_RANKS = replace(SIXTEEN_GROUPS, policy_ranks=2, engines=2)
COPIES_GIB = 2 * 12 * 596e6 / GIB
"""A snapshot and a checkpoint of 12 bytes a parameter. No rank reads the weights as a whole."""


@pytest.mark.parametrize(
    ("host_gib", "model", "work", "kept"),
    [
        (1.9 * COPIES_GIB, QWEN3_0_6B, TWO_RANKS, False),
        (2.1 * COPIES_GIB, QWEN3_0_6B, TWO_RANKS, True),
        (1.9 * COPIES_GIB, QWEN3_0_6B, replace(TWO_RANKS, moment_bytes=2), True),
        (2_000, QWEN3_0_6B, SIXTEEN_GROUPS, False),
        # 8B needs 366 GiB for any number of ranks
        *((host, QWEN3_8B, work, host > 366) for host in (360, 372) for work in (TWO_RANKS, EIGHT_RANKS)),
    ],
)
def test_a_host_holds_snapshots_in_half_of_its_memory(
    host_gib: float, model: ModelShape, work: Workload, kept: bool
) -> None:
    plan = planned(gpu(140, host_gib), model, work)
    assert copies_with_room(Setup(work, model, gpu(140, host_gib)), plan).snapshot is kept


TWO = replace(LONG_STEP, policy_ranks=2, engines=2)
SIDE_BY_SIDE = {"kvCache": "18Gi", "optimizerOffload": "Enabled"}


@pytest.mark.parametrize(
    ("hardware", "step", "settings", "ahead"),
    [
        (gpu(79, 256), LONG_STEP, SIDE_BY_SIDE, True),
        (gpu(56, 256), LONG_STEP, SIDE_BY_SIDE, False),  # no room beside an awake engine
        (gpu(56, 256), APART_LONG, SIDE_BY_SIDE, True),
        (gpu(139, 256), LONG_STEP, {"policyOffload": "Enabled"}, False),  # it makes room first
        (LAPTOP, LONG_STEP, {}, False),
        # several ranks need room for gathered weights and gradients, and hold less of the state
        (gpu(79, 256), TWO, SIDE_BY_SIDE, True),
        (gpu(74, 256), TWO, SIDE_BY_SIDE, False),
        (gpu(28, 256), replace(APART_LONG, policy_ranks=2), {"optimizerOffload": "Enabled"}, False),
        (gpu(28, 256), replace(APART_LONG, policy_ranks=4), {"optimizerOffload": "Enabled"}, True),
        # a KV cache that takes all planned memory leaves no room, although a tenth of the GPU is unplanned
        (gpu(139, 256), TWO, {"kvCache": "50Gi"}, False),
        (gpu(139, 256), TWO, {"kvCache": "40Gi"}, True),
    ],
)
def test_the_policy_compiles_while_the_engine_starts_if_both_have_room(
    hardware: Hardware, step: Workload, settings: dict[str, Any], ahead: bool
) -> None:
    plan = planned(hardware, QWEN3_8B, step, **settings)
    assert compiles_ahead(Setup(step, QWEN3_8B, hardware), plan) is ahead


# --- any machine ---

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
    st.builds(Hardware, st.just("cpu"), st.just(0), st.integers(GIB, 512 * GIB)),
    st.builds(Hardware, st.just("cuda"), st.integers(4 * GIB, 192 * GIB), st.integers(8 * GIB, 2048 * GIB)),
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
    auto_engines=st.booleans(),
    reference_model=st.booleans(),
    topology=st.sampled_from(["Colocated", "Disaggregated"]),
)


@given(machines, shapes, workloads)
def test_any_machine_gets_a_plan_that_fits_one_sequence(
    hardware: Hardware, model: ModelShape, workload: Workload
) -> None:
    plan = planned(hardware, model, workload)
    workload = Setup(workload, model, hardware).under(plan).work
    assert plan.tensor_parallel_size == workload.tensor_parallel_size
    assert plan.generation == 1
    assert plan.micro_batch_tokens >= workload.max_sequence_tokens
    assert plan.kv_cache_bytes >= kv_bytes(workload, model, 1)
    assert plan.kv_cache_bytes <= max(kv_bytes(workload, model, workload.sequences_per_engine), 64 * MIB) + MIB
    assert plan.logprob_chunk_tokens * model.vocabulary * 4 <= (GIB if hardware.device == "cuda" else 256 * MIB)
    assert plan.sync_bucket_bytes >= model.largest_parameter_bytes


@given(machines, shapes, workloads)
def test_more_memory_never_shrinks_micro_batches_or_kv_cache(
    hardware: Hardware, model: ModelShape, workload: Workload
) -> None:
    pinned: dict[str, Any] = {
        "optimizerOffload": "Disabled",
        "policyOffload": "Disabled",
        "activationCheckpointing": "Disabled",
    }
    larger = replace(
        hardware,
        device_memory_bytes=2 * hardware.device_memory_bytes,
        host_memory_bytes=2 * hardware.host_memory_bytes,
    )
    one_size = replace(workload, auto_engines=False)
    before, after = (planned(machine, model, one_size, **pinned) for machine in (hardware, larger))
    assert after.micro_batch_tokens >= before.micro_batch_tokens
    assert after.kv_cache_bytes >= before.kv_cache_bytes


@given(machines, shapes, workloads)
def test_chosen_engines_are_as_good_as_any_others(hardware: Hardware, model: ModelShape, workload: Workload) -> None:
    setup = Setup(replace(workload, auto_engines=True), model, hardware)
    chosen = best_choice(MemorySettings(), setup)
    for size in engine_sizes(setup):
        other = best_choice(MemorySettings(), setup.with_work(auto_engines=False, **with_size(workload, size)))
        assert chosen.price <= other.price


def with_size(work: Workload, size: int) -> dict[str, int]:
    other = work.with_engines_of(size)
    names = ("engines", "tensor_parallel_size", "max_concurrent_sequences")
    return {name: getattr(other, name) for name in names}
