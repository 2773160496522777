"""Memory plans for tests."""

from __future__ import annotations

from typing import Any

from rljob_api.memory_plan import MemoryPlan


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
