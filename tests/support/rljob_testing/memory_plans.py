"""Memory plans and memory profiles for tests."""

from __future__ import annotations

from typing import Any

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile

_GIB = 1 << 30


def memory_plan(**changes: Any) -> MemoryPlan:
    """A small valid plan for a GPU that policy and engine share, with the fields in `changes` replaced."""
    fields: dict[str, Any] = {
        "empty_cache": True,
        "expandable_segments": True,
        "rollout_sleep": "Level2",
        "kv_cache_bytes": 1 << 30,
        "micro_batch_tokens": 4096,
        "logprob_chunk_tokens": 512,
        "activation_checkpointing": False,
        "optimizer_offload": False,
        "sync_bucket_bytes": 256 << 20,
    }
    return MemoryPlan(**(fields | changes))


def memory_profile(**changes: Any) -> MemoryProfile:
    """The profile of a small model on a GPU of 80 GiB, with the fields in `changes` replaced."""
    fields: dict[str, Any] = {
        "policy_ranks": 1,
        "longest_sequence_tokens": 64,
        "smallest_kv_cache_bytes": _GIB // 64,
        "largest_parameter_bytes": _GIB // 64,
        "weight_bytes": _GIB,
        "optimizer_bytes": 4 * _GIB,
        "activation_bytes_per_token": 1 << 20,
        "checkpointed_activation_bytes_per_token": 1 << 16,
        "logits_bytes_per_token": 1 << 20,
        "device_total_bytes": 80 * _GIB,
        "host_memory_bytes": 128 * _GIB,
        "shared_memory_bytes": 8 * _GIB,
    }
    return MemoryProfile(**(fields | changes))
