"""GPU memory of a budget, against numbers worked out by hand and against recorded runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_memory.budget import Setup, budget, facts_of, setup_of
from rljob_memory.budget.gpu import (
    PolicyState,
    activation_bytes_per_token,
    backward_buffers,
    engine_weight_bytes,
    kv_bytes,
    logits_bytes,
)
from rljob_memory.hardware import GPU_TYPES, Hardware
from rljob_memory.model_shape import ModelShape
from rljob_memory.sizes import GIB
from rljob_memory.workload import Workload, workload_of
from rljob_testing.memory_plans import QWEN3_8B, QWEN3_14B, memory_plan
from tests.unit.memory.recovery.failures import growing_job

MODEL = ModelShape(1000, layers=2, hidden=8, kv_heads=2, head_dim=4, vocabulary=50, bytes_per_parameter=2)
WORK = Workload(4, 2, max_prompt_tokens=40, max_response_tokens=24)
H200 = Hardware("cuda", GPU_TYPES["h200"].memory_bytes, 512 * GIB, gpu="h200", layers_compiled=True)


def state_bytes(model: ModelShape, work: Workload, **plan: Any) -> int:
    """Memory of a rank between updates, in its tensors."""
    return budget(Setup(work, model, H200), memory_plan(**plan)).in_torch("policy", "checkpoint")


def test_a_policy_rank_holds_its_share_of_float32_weights_and_moments() -> None:
    assert state_bytes(MODEL, WORK) == 1000 * 12
    assert state_bytes(MODEL, replace(WORK, policy_ranks=4)) == 1000 * 3
    with_kl = replace(WORK, reference_model=True)
    assert state_bytes(MODEL, with_kl) == 1000 * 14, "the reference is in bfloat16"
    assert state_bytes(MODEL, with_kl, optimizer_offload=True) == 1000 * 2, "and in host memory with offload"
    assert state_bytes(MODEL, replace(WORK, moment_bytes=2)) == 1000 * 8


def test_a_share_of_the_state_leaves_the_gpu_and_the_reference_model_last() -> None:
    with_kl = replace(WORK, reference_model=True)
    assert [state_bytes(MODEL, with_kl, optimizer_offload=share) for share in (0.25, 0.5)] == [11_500, 9000]


@pytest.mark.parametrize(
    ("ranks", "bytes_per_parameter", "moment_bytes", "kept", "moved"),
    [
        (1, 2, 4, 2, 10),
        (1, 2, 2, 2, 6),
        (1, 2, 1 + 4 / 256, 2, 4.03125),
        (1, 4, 4, 4, 8),
        (2, 2, 4, 4, 8),
        (2, 2, 2, 4, 4),
        (2, 2, 1 + 4 / 256, 4, 2.03125),
    ],
)
def test_offload_moves_moments_and_the_remainders_of_a_single_rank(
    ranks: int, bytes_per_parameter: int, moment_bytes: float, kept: int, moved: float
) -> None:
    model = replace(MODEL, parameters=3200, bytes_per_parameter=bytes_per_parameter)
    work = replace(WORK, policy_ranks=ranks, moment_bytes=moment_bytes)
    assert state_bytes(model, work, optimizer_offload=True) * ranks == 3200 * kept
    assert state_bytes(model, work) * ranks == 3200 * (kept + moved)
    state = PolicyState(work, model)
    assert state.optimizer * ranks == 3200 * moved
    assert (state.changed + state.gradients) * ranks == 3200 * (kept + moved + 4)


def test_adapters_leave_frozen_weights_and_their_own_state() -> None:
    adapted = replace(MODEL, adapter_parameters=40)
    assert state_bytes(adapted, WORK) == 1000 * 2 + 40 * 12
    assert state_bytes(adapted, WORK, optimizer_offload=True) == 1000 * 2 + 40 * 2
    assert state_bytes(adapted, replace(WORK, policy_ranks=4)) == 500 + 120
    assert state_bytes(adapted, replace(WORK, reference_model=True)) == 2480, "the frozen weights are the reference"
    assert backward_buffers(WORK, adapted) == {}, "the head is frozen, and nothing is gathered"
    assert PolicyState(WORK, adapted).gradients == 4 * 40


def test_an_update_adds_gradients_the_heads_own_and_gathered_weights() -> None:
    embedding = 50 * 8 * 2
    layer = (2000 - embedding) // 2
    assert backward_buffers(WORK, MODEL) == {}, "each gradient is added to its sum as it is computed"
    in_float32 = replace(MODEL, bytes_per_parameter=4)
    assert backward_buffers(WORK, in_float32) == {"gradient of the head": 4 * embedding}, "autograd adds it"
    assert backward_buffers(replace(WORK, policy_ranks=2), MODEL) == {
        "gradient of the head": 3 * embedding + 2 * embedding,
        "gathered weights": 2 * embedding + 2 * layer,
        "gradients in reduction": 12 * 1000 // 2,
    }


def test_compiled_layers_keep_what_their_widths_ask_for() -> None:
    """Measured: 22 numbers with 0.6B, 16.8 with 8B, 17.7 with 14B."""
    small = ModelShape(596_000_000, 28, 1024, 8, 128, 151_936, 2, heads=16, intermediate=3072)
    for model, numbers in ((small, 22.0), (QWEN3_8B, 16.75), (QWEN3_14B, 17.8)):
        each = activation_bytes_per_token(model, checkpointing=False, compiled=True)
        assert each / (model.layers * model.hidden * 2) == pytest.approx(numbers)


def test_the_kv_cache_counts_whole_blocks_of_keys_and_values() -> None:
    a_token = 2 * 2 * 2 * 4 * 2  # keys and values, layers, heads, numbers, bytes
    assert kv_bytes(WORK, MODEL, 3) == (3 * 2 + 1) * 32 * a_token  # 64 tokens: two blocks of 32
    assert kv_bytes(replace(WORK, tensor_parallel_size=2), MODEL, 3) == (3 * 2 + 1) * 32 * a_token // 2
    assert kv_bytes(replace(WORK, max_response_tokens=25), MODEL, 1) == (3 + 1) * 32 * a_token
    assert kv_bytes(replace(WORK, quantized_kv_cache=True), MODEL, 3) == kv_bytes(WORK, MODEL, 3) // 2


def engine(work: Workload, phase: Any, **plan: Any) -> int:
    return budget(Setup(work, MODEL, H200), memory_plan(**plan)).of("gpu", owner="engine").total("gpu", phase)


def test_an_engine_on_several_gpus_keeps_nccl_buffers_on_each_also_asleep() -> None:
    shared = replace(WORK, tensor_parallel_size=2)
    assert engine(shared, "rollout") - engine(WORK, "rollout") == GIB - 1000, "and half of the weights"
    assert engine(shared, "update") - engine(WORK, "update") == GIB
    assert engine_weight_bytes(shared, MODEL) == engine_weight_bytes(WORK, MODEL) // 2


def test_an_engine_that_sleeps_leaves_weights_and_kv_cache_to_the_update() -> None:
    awake, asleep = (engine(WORK, "update", rollout_sleep=level) for level in ("Disabled", "Level2"))
    assert awake == engine(WORK, "rollout")
    graphs = int(0.6 * GIB) + 590_000 * 8
    logits = 2 * 50 * 8  # of 8 sequences, in float32 in place of 16 bits
    assert awake - asleep == 2000 + memory_plan().kv_cache_bytes + graphs + logits - GIB // 2
    quantized = replace(WORK, quantized_weights=True)
    in_8_bits = engine(quantized, "rollout") - engine_weight_bytes(quantized, MODEL)
    assert engine(WORK, "rollout") - 2000 - in_8_bits == logits, "an engine in 8 bits has logits in 16 bits"
    assert engine(WORK, "sync") == asleep + 2000 + GIB // 4, "it has its weights, and loads them in place"


def test_an_engine_in_8_bits_keeps_embeddings_and_half_of_the_rest() -> None:
    embedding = 50 * 8 * 2
    quantized = replace(WORK, quantized_weights=True)
    assert engine_weight_bytes(WORK, MODEL) == 2000
    assert engine_weight_bytes(quantized, MODEL) == 2 * embedding + (2000 - 2 * embedding) // 2


def test_checkpointed_activations_are_layer_inputs_and_one_whole_layer() -> None:
    whole_layer = activation_bytes_per_token(MODEL, checkpointing=False, compiled=False) // 2
    assert activation_bytes_per_token(MODEL, checkpointing=True, compiled=False) == 2 * 8 * 2 + whole_layer
    assert logits_bytes(MODEL, 3, compiled=True) == 2 * 3 * 200


def test_engines_and_ranks_share_the_sequences_of_a_step() -> None:
    assert (WORK.sequences_per_engine, WORK.sequences_per_rank, WORK.max_sequence_tokens) == (8, 8, 64)
    shared = replace(WORK, engines=3, policy_ranks=3)
    assert (shared.sequences_per_engine, shared.sequences_per_rank) == (4, 3), "whole groups; single sequences"
    assert replace(WORK, max_concurrent_sequences=5).sequences_per_engine == 5


def test_engines_apart_use_no_memory_of_the_policys_gpus() -> None:
    apart = budget(Setup(replace(WORK, topology="Disaggregated"), MODEL, H200), memory_plan())
    assert {line.owner for line in apart.uses("gpu", "rollout")} == {"policy"}
    assert {line.owner for line in apart.uses("gpu", "update", pod="rollout")} == {"engine"}, "it never sleeps"
    assert list(apart.pods()) == ["policy", "rollout"]
    assert list(budget(Setup(WORK, MODEL, H200), memory_plan()).pods()) == ["policy"]


def test_policy_offload_takes_the_weights_off_the_gpu_in_a_rollout_alone() -> None:
    """An engine reads weights that move from two buffers."""
    away, there = (budget(Setup(WORK, MODEL, H200), memory_plan(policy_offload=offload)) for offload in (True, False))
    freed = {phase: there.total("gpu", phase) - away.total("gpu", phase) for phase in ("rollout", "update", "sync")}
    assert freed == {"rollout": 2000, "update": 0, "sync": -2 * 2000}


def test_the_setup_of_reported_facts_is_the_trainers_own() -> None:
    spec = growing_job()
    setup = Setup(workload_of(spec), QWEN3_8B, H200)
    assert setup_of(spec, facts_of(setup)) == setup
    on_cpu = Setup(workload_of(spec), MODEL, Hardware("cpu", 0, 16 * GIB))
    assert setup_of(spec, facts_of(on_cpu)) == on_cpu
    assert setup_of(spec, None) is None


@pytest.mark.parametrize("sleep", ["Level2", "Disabled"])
def test_an_allocator_that_keeps_its_cache_holds_what_the_update_took(sleep: str) -> None:
    setup = Setup(replace(WORK, keeps_cache=True), QWEN3_8B, H200)
    predicted = budget(setup, memory_plan(rollout_sleep=sleep))
    in_update = predicted.total("gpu", "update")
    assert predicted.total("gpu", "sync") == in_update
    assert (predicted.total("gpu", "rollout") == in_update) == (sleep == "Disabled")


def test_weights_that_are_cast_or_trained_in_16_bits_take_their_bytes() -> None:
    cast, small = replace(WORK, casts_weights=True), replace(WORK, master_bytes=2, moment_bytes=2)
    assert state_bytes(MODEL, cast) == state_bytes(MODEL, WORK)
    assert state_bytes(MODEL, replace(cast, reference_model=True)) == 1000 * 16, "its weights are float32"
    assert state_bytes(MODEL, small) == 1000 * 6
    casts, half = PolicyState(cast, MODEL), PolicyState(small, MODEL)
    assert (casts.casts, casts.gradients, half.casts, half.gradients) == (2000, 4000, 0, 2000)
