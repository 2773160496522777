"""`empty_cache`: what the caching allocator holds and does not use goes back to the device, for the engine."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORTH_A_FLUSH_BYTES = 64 << 20
"""Less than this stays cached: a flush waits for the device, and the next phase would have to ask for it again."""


@contextmanager
def cache_handed_back(*, enabled: bool) -> Iterator[None]:
    """After the block, failed or not, the device has back what this process cached.

    Around a whole phase, never around a micro-batch: there it would only take away what the next one uses again.
    """
    try:
        yield
    except BaseException as error:
        # What failed would keep its tensors alive for as long as anyone holds the error.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        if enabled:
            hand_back_cached_memory()


def hand_back_cached_memory() -> None:
    """Give cached memory back to the device; does nothing where that is less than `WORTH_A_FLUSH_BYTES`."""
    gc.collect(generation=0)
    stats = torch.cuda.memory_stats()
    cached_bytes = stats.get("reserved_bytes.all.current", 0) - stats.get("allocated_bytes.all.current", 0)
    if cached_bytes >= WORTH_A_FLUSH_BYTES:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
