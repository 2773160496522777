"""`empty_cache`: releases the unused memory of the caching allocator, for the engine on the same GPU."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MIN_RELEASE_BYTES = 64 << 20
"""Less than this stays cached: a release waits for the device, and the next phase would allocate again."""


@contextmanager
def cache_released_after(*, enabled: bool) -> Iterator[None]:
    """Release cached memory after the block, also if it fails.

    For a whole phase, not for a micro-batch: the next micro-batch would allocate the same memory again.
    """
    try:
        yield
    except BaseException as error:
        # Otherwise the error would keep the tensors of the failed frames alive.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        if enabled:
            release_cached_memory()


def release_cached_memory() -> None:
    """Release cached memory to the device. Does nothing if it is less than `MIN_RELEASE_BYTES`."""
    gc.collect(generation=0)
    stats = torch.cuda.memory_stats()
    cached_bytes = stats.get("reserved_bytes.all.current", 0) - stats.get("allocated_bytes.all.current", 0)
    if cached_bytes >= MIN_RELEASE_BYTES:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
