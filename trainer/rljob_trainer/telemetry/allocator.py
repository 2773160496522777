"""The counters of torch's caching allocator, all from one call.

`torch.cuda.memory_allocated()` and its sisters each make that call anew, and flatten its 100 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AllocatorCounters:
    """Bytes now, peaks since the last reset, and counts of the process's life. See `MemorySample`."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    active: int = 0
    inactive_split: int = 0
    alloc_retries: int = 0
    ooms: int = 0


def allocator_counters() -> AllocatorCounters:
    """Of the current device; zeros before its first use. Takes the allocator's lock, and waits for no kernel."""
    import torch

    if not torch.cuda.is_initialized():
        return AllocatorCounters()
    return counters_of(torch._C._cuda_memoryStats(torch.cuda.current_device()))


def counters_of(stats: Mapping[str, Any]) -> AllocatorCounters:
    """`stats`: as `torch.cuda.memory_stats_as_nested_dict` gives them. What a version of torch lacks is 0."""

    def of_all_pools(name: str, when: str) -> int:
        return int(stats.get(name, {}).get("all", {}).get(when, 0))

    return AllocatorCounters(
        allocated=of_all_pools("allocated_bytes", "current"),
        reserved=of_all_pools("reserved_bytes", "current"),
        peak_allocated=of_all_pools("allocated_bytes", "peak"),
        peak_reserved=of_all_pools("reserved_bytes", "peak"),
        active=of_all_pools("active_bytes", "current"),
        inactive_split=of_all_pools("inactive_split_bytes", "current"),
        alloc_retries=int(stats.get("num_alloc_retries", 0)),
        ooms=int(stats.get("num_ooms", 0)),
    )
