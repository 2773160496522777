"""Estimates of memory, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from rljob_memory.estimate import (
    activation_bytes_per_token,
    kv_bytes,
    logits_bytes_per_token,
    optimizer_bytes,
    policy_state_bytes,
    policy_update_bytes,
)
from rljob_memory.workload import ModelShape, Workload

MODEL = ModelShape(1000, layers=2, hidden=8, kv_heads=2, head_dim=4, vocabulary=50, bytes_per_parameter=2)
WORK = Workload(4, 2, max_prompt_tokens=40, max_response_tokens=24)


def test_a_policy_rank_holds_its_share_of_float32_weights_and_moments() -> None:
    assert policy_state_bytes(MODEL, WORK, optimizer_offload=False) == 1000 * 12
    assert policy_state_bytes(MODEL, WORK, optimizer_offload=True) == 1000 * 4
    assert policy_state_bytes(MODEL, replace(WORK, policy_ranks=4), optimizer_offload=False) == 1000 * 3
    assert policy_state_bytes(MODEL, replace(WORK, reference_model=True), optimizer_offload=False) == 1000 * 16
    assert optimizer_bytes(MODEL) == 1000 * 8


def test_an_update_adds_gradients_and_gathered_weights() -> None:
    embedding = 50 * 8 * 2
    layer = (2000 - embedding) // 2
    assert policy_update_bytes(MODEL, WORK) == 4000 + 2 * embedding + 2 * layer


def test_the_kv_cache_counts_whole_blocks_of_keys_and_values() -> None:
    a_token = 2 * 2 * 2 * 4 * 2  # keys and values, layers, heads, numbers, bytes
    assert kv_bytes(MODEL, WORK, sequences=3) == (3 * 2 + 1) * 32 * a_token  # 64 tokens: two blocks of 32
    assert kv_bytes(MODEL, replace(WORK, tensor_parallel_size=2), sequences=3) == (3 * 2 + 1) * 32 * a_token // 2
    assert kv_bytes(MODEL, replace(WORK, max_response_tokens=25), sequences=1) == (3 + 1) * 32 * a_token


def test_checkpointed_activations_are_layer_inputs_and_one_whole_layer() -> None:
    whole_layer = activation_bytes_per_token(MODEL, checkpointing=False) // 2
    assert activation_bytes_per_token(MODEL, checkpointing=True) == 2 * 8 * 2 + whole_layer
    assert logits_bytes_per_token(MODEL) == 200


def test_engines_and_ranks_share_the_sequences_of_a_step() -> None:
    assert (WORK.sequences_per_engine, WORK.sequences_per_rank, WORK.max_sequence_tokens) == (8, 8, 64)
    shared = replace(WORK, engines=3, policy_ranks=3)
    assert (shared.sequences_per_engine, shared.sequences_per_rank) == (4, 3), "whole groups; single sequences"
    assert replace(WORK, max_concurrent_sequences=5).sequences_per_engine == 5
