"""Memory plans, setups of budgets and snapshots of failed requests for tests."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rljob_api.memory_facts import MemoryFacts
from rljob_api.memory_failure import Activity, DeviceMemory, FailureKind, MemoryFailure
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.budget import Setup, facts_of
from rljob_memory.hardware import Hardware
from rljob_memory.model_shape import ModelShape
from rljob_memory.workload import Workload

GIB, MIB = 1 << 30, 1 << 20

QWEN3_4B = ModelShape(4_020_000_000, 36, 2560, 8, 128, 151_936, 2, heads=32, intermediate=9728)
QWEN3_8B = ModelShape(8_190_000_000, 36, 4096, 8, 128, 151_936, 2, heads=32, intermediate=12_288)
QWEN3_14B = ModelShape(14_770_000_000, 40, 5120, 8, 128, 151_936, 2, heads=40, intermediate=17_408)
QWEN3_32B = ModelShape(32_762_000_000, 64, 5120, 8, 128, 151_936, 2, heads=64, intermediate=25_600)
"""Shapes of Qwen3, with rounded numbers of parameters."""


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


def memory_setup(**changes: Any) -> Setup:
    """A model of 0.5 billion parameters on a GPU of 80 GiB, with the fields in `changes` of workload, model or machine
    replaced."""
    parts = (
        Workload(16, 8, max_prompt_tokens=16, max_response_tokens=48),
        ModelShape(500_000_000, 24, 896, 2, 64, 8_192, bytes_per_parameter=2, heads=14, intermediate=4864),
        Hardware("cuda", 80 * GIB, 128 * GIB, shared_memory_bytes=8 * GIB, layers_compiled=True),
    )
    work, model, hardware = (
        replace(part, **{name: value for name, value in changes.items() if name in type(part).__dataclass_fields__})
        for part in parts
    )
    return Setup(work, model, hardware)  # type: ignore[arg-type]


def memory_facts(**changes: Any) -> MemoryFacts:
    """The facts about `memory_setup`, as a trainer reports them."""
    return facts_of(memory_setup(**changes))


BEGUN = datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp()
"""Start of the run, in seconds since the epoch."""


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
