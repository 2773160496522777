"""The memory profile of a job agrees with the first plan's estimates."""

from __future__ import annotations

from dataclasses import replace

from rljob_memory.recovery import profile_of
from rljob_memory.sizes import GIB
from tests.unit.memory.recovery.failures import FIRST_PLAN, H200, QWEN3_0_6B, SIXTEEN_GROUPS


def test_profile_of_qwen3_on_one_h200() -> None:
    facts = profile_of(H200, QWEN3_0_6B, SIXTEEN_GROUPS, fused=True, shared_memory_bytes=GIB)
    assert facts.longest_sequence_tokens == 612
    assert facts.weight_bytes == 2 * 596_000_000
    assert facts.optimizer_bytes == 10 * 596_000_000, "two float32 moments, and the remainders of the masters"
    assert facts.policy_weight_bytes == 2 * 596_000_000
    assert facts.largest_parameter_bytes == 151_936 * 1_024 * 2 <= FIRST_PLAN.sync_bucket_bytes
    assert facts.logits_bytes_per_token == 2 * 4 * 151_936, "float32 logits, and two gradients in 16 bits"
    assert facts.vocabulary == 151_936
    assert 612 * 112 * 1_024 <= facts.smallest_kv_cache_bytes < FIRST_PLAN.kv_cache_bytes
    assert facts.checkpointed_activation_bytes_per_token < facts.activation_bytes_per_token
    assert (facts.device_total_bytes, facts.host_memory_bytes) == (140 * GIB, 128 * GIB)
    assert facts.shared_memory_bytes == GIB


def test_shares_of_ranks_and_tensor_parallel_gpus() -> None:
    shared = replace(SIXTEEN_GROUPS, policy_ranks=4, tensor_parallel_size=2, topology="Disaggregated")
    facts = profile_of(H200, QWEN3_0_6B, shared, fused=True)
    assert facts.optimizer_bytes == 2 * 596_000_000
    assert facts.weight_bytes == 596_000_000
    assert facts.policy_weight_bytes == 596_000_000, "float32 shards"
    assert facts.policy_ranks == 4
    assert not facts.colocated
