"""Memory plans, memory profiles and snapshots of failed requests for tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rljob_api.memory_failure import Activity, DeviceMemory, FailureKind, MemoryFailure
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


BEGUN = datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp()
"""Start of the run, in seconds since the epoch."""
GIB, MIB = 1 << 30, 1 << 20


def memory_failure(**changes: Any) -> MemoryFailure:
    """A failed request in the update of step 7, 150 s after the start, with the fields in `changes` replaced."""
    values: dict[str, Any] = {
        "kind": FailureKind.ALLOCATOR,
        "time": datetime.fromtimestamp(BEGUN + 150, UTC),
        "role": "policy",
        "rank": 1,
        "step": 7,
        "phase": "update",
        "micro_batch": 3,
        "activity": Activity.OPTIMIZER,
        "device": DeviceMemory(
            requested_bytes=4 * GIB + 3 * MIB,
            gpu=0,
            total_bytes=80 * GIB,
            free_bytes=GIB,
            allocated_bytes=38 * GIB,
            cached_bytes=GIB,
            largest_cached_block_bytes=600 * MIB,
        ),
    }
    return MemoryFailure(**{**values, **changes})
