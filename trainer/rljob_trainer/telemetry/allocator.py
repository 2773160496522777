"""The counters of torch's caching allocator, all from one call.

`torch.cuda.memory_allocated()` and similar functions each repeat that call and flatten its 100 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljob_memory.sample import MemorySample


def allocator_sample() -> MemorySample:
    """Memory of the current device in torch's allocator; zeros before its first use.

    Takes the allocator's lock, and waits for no kernel.
    """
    import torch

    if not torch.cuda.is_initialized():
        return MemorySample()
    return sample_of_stats(torch._C._cuda_memoryStats(torch.cuda.current_device()))


def sample_of_stats(stats: Mapping[str, Any]) -> MemorySample:
    """`stats`: as `torch.cuda.memory_stats_as_nested_dict` gives them. A counter that a version of torch lacks is 0."""

    def of_all_pools(name: str, when: str) -> int:
        return int(stats.get(name, {}).get("all", {}).get(when, 0))

    return MemorySample(
        allocated_bytes=of_all_pools("allocated_bytes", "current"),
        reserved_bytes=of_all_pools("reserved_bytes", "current"),
        peak_allocated_bytes=of_all_pools("allocated_bytes", "peak"),
        peak_reserved_bytes=of_all_pools("reserved_bytes", "peak"),
        active_bytes=of_all_pools("active_bytes", "current"),
        inactive_split_bytes=of_all_pools("inactive_split_bytes", "current"),
        alloc_retries=int(stats.get("num_alloc_retries", 0)),
        ooms=int(stats.get("num_ooms", 0)),
    )
