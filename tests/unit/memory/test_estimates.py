"""Estimates of memory, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_memory.estimate import (
    activation_bytes_per_token,
    awake_engine_bytes,
    engine_weight_bytes,
    kv_bytes,
    logits_bytes_per_token,
    optimizer_bytes,
    policy_state_bytes,
    policy_update_bytes,
    reference_seconds,
    sleeping_engine_bytes,
    trained_bytes,
)
from rljob_memory.sizes import GIB
from rljob_memory.workload import ModelShape, Workload

MODEL = ModelShape(1000, layers=2, hidden=8, kv_heads=2, head_dim=4, vocabulary=50, bytes_per_parameter=2)
WORK = Workload(4, 2, max_prompt_tokens=40, max_response_tokens=24)


def test_a_policy_rank_holds_its_share_of_float32_weights_and_moments() -> None:
    assert policy_state_bytes(MODEL, WORK, optimizer_offload=False) == 1000 * 12
    assert policy_state_bytes(MODEL, replace(WORK, policy_ranks=4), optimizer_offload=False) == 1000 * 3
    with_kl = replace(WORK, reference_model=True)
    assert policy_state_bytes(MODEL, with_kl, optimizer_offload=False) == 1000 * 14, "the reference is in bfloat16"
    assert policy_state_bytes(MODEL, with_kl, optimizer_offload=True) == 1000 * 2, "and in host memory with offload"
    halved = replace(WORK, moment_bytes=2)
    assert policy_state_bytes(MODEL, halved, optimizer_offload=False) == 1000 * 8


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
    assert policy_state_bytes(model, work, optimizer_offload=True) * ranks == 3200 * kept
    assert policy_state_bytes(model, work, optimizer_offload=False) * ranks == 3200 * (kept + moved)
    assert optimizer_bytes(model, work) == 3200 * moved
    assert trained_bytes(model, work) == 3200 * (kept + 4)


def test_adapters_leave_frozen_weights_and_their_own_state() -> None:
    adapted = replace(MODEL, adapter_parameters=40)
    assert policy_state_bytes(adapted, WORK, optimizer_offload=False) == 1000 * 2 + 40 * 12
    assert policy_state_bytes(adapted, WORK, optimizer_offload=True) == 1000 * 2 + 40 * 2
    assert policy_state_bytes(adapted, replace(WORK, policy_ranks=4), optimizer_offload=False) == 500 + 120
    with_kl = replace(WORK, reference_model=True)
    assert policy_state_bytes(adapted, with_kl, optimizer_offload=False) == 2480, "the frozen weights are the reference"
    assert policy_update_bytes(adapted, WORK) == 4 * 40, "the head is frozen, and nothing is gathered"
    assert optimizer_bytes(adapted, WORK) == 40 * 10


def test_an_update_adds_gradients_the_heads_own_and_gathered_weights() -> None:
    embedding = 50 * 8 * 2
    layer = (2000 - embedding) // 2
    assert policy_update_bytes(MODEL, WORK) == 4000 + 3 * embedding, "the head's gradient in float32 and bfloat16"
    two = replace(WORK, policy_ranks=2)
    assert policy_update_bytes(MODEL, two) == 2000 + 3 * embedding + 2 * embedding + 2 * embedding + 2 * layer


def test_compiled_layers_keep_what_their_widths_ask_for() -> None:
    """0.6B: 22 numbers were measured. 8B has a narrower MLP for its size."""
    small = ModelShape(596_000_000, 28, 1024, 8, 128, 151_936, 2, heads=16, intermediate=3072)
    large = ModelShape(8_190_000_000, 36, 4096, 8, 128, 151_936, 2, heads=32, intermediate=12_288)
    numbers = {
        model: activation_bytes_per_token(model, checkpointing=False, fused=True) / (model.layers * model.hidden * 2)
        for model in (small, large)
    }
    assert numbers[small] == pytest.approx(23.0)
    assert numbers[large] == pytest.approx(17.75)


def test_the_kv_cache_counts_whole_blocks_of_keys_and_values() -> None:
    a_token = 2 * 2 * 2 * 4 * 2  # keys and values, layers, heads, numbers, bytes
    assert kv_bytes(MODEL, WORK, sequences=3) == (3 * 2 + 1) * 32 * a_token  # 64 tokens: two blocks of 32
    assert kv_bytes(MODEL, replace(WORK, tensor_parallel_size=2), sequences=3) == (3 * 2 + 1) * 32 * a_token // 2
    assert kv_bytes(MODEL, replace(WORK, max_response_tokens=25), sequences=1) == (3 + 1) * 32 * a_token


def test_an_engine_on_several_gpus_keeps_nccl_buffers_on_each_also_asleep() -> None:
    shared = replace(WORK, tensor_parallel_size=2)
    assert awake_engine_bytes(shared) - awake_engine_bytes(WORK) == GIB
    assert sleeping_engine_bytes(shared) - sleeping_engine_bytes(WORK) == GIB
    assert engine_weight_bytes(MODEL, shared) == engine_weight_bytes(MODEL, WORK) // 2


def test_an_engine_in_8_bits_keeps_embeddings_and_half_of_the_rest() -> None:
    embedding = 50 * 8 * 2
    assert engine_weight_bytes(MODEL, WORK) == 2000
    assert (
        engine_weight_bytes(MODEL, replace(WORK, quantized_weights=True)) == 2 * embedding + (2000 - 2 * embedding) // 2
    )
    assert kv_bytes(MODEL, replace(WORK, quantized_kv_cache=True), 3) == kv_bytes(MODEL, WORK, 3) // 2


def test_checkpointed_activations_are_layer_inputs_and_one_whole_layer() -> None:
    whole_layer = activation_bytes_per_token(MODEL, checkpointing=False) // 2
    assert activation_bytes_per_token(MODEL, checkpointing=True) == 2 * 8 * 2 + whole_layer
    assert logits_bytes_per_token(MODEL) == 200


def test_a_reference_model_on_the_host_passes_the_gpu_in_each_micro_batch() -> None:
    assert reference_seconds(MODEL, WORK, 16) == 0
    with_reference = replace(WORK, reference_model=True)
    assert reference_seconds(MODEL, with_reference, 16) == pytest.approx(16 * 2000 / 40e9)
    assert reference_seconds(MODEL, replace(with_reference, policy_ranks=4), 16) == pytest.approx(4 * 2000 / 40e9)
    adapted = replace(MODEL, adapter_parameters=40)
    assert reference_seconds(adapted, with_reference, 16) == 0, "the frozen weights are the reference"


def test_engines_and_ranks_share_the_sequences_of_a_step() -> None:
    assert (WORK.sequences_per_engine, WORK.sequences_per_rank, WORK.max_sequence_tokens) == (8, 8, 64)
    shared = replace(WORK, engines=3, policy_ranks=3)
    assert (shared.sequences_per_engine, shared.sequences_per_rank) == (4, 3), "whole groups; single sequences"
    assert replace(WORK, max_concurrent_sequences=5).sequences_per_engine == 5
