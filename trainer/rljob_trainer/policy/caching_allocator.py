"""torch's caching allocator of a policy rank: expandable segments, and the release of cached memory.

Expandable segments grow, to prevent fragmentation by sequences of changing lengths. They are for the policy's own work.
Memory that other processes read (CUDA IPC) must be in classic segments: exporting expandable ones needs privileges that
a container does not have. Cached memory is released for the engine on the same GPU (`empty_cache`).
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import torch

from rljob_client.errors import RunError
from rljob_memory.allocator import ALLOCATOR_VARIABLE, allocator_options

_PAGE_MIB, _DEFAULT_PAGE_MIB = 256, 20
"""Expandable segments grow and shrink by pages, and mapping a large page takes as long as a small one. With torch's
default, releasing 24 GiB after each update and growing again in the next would take a third of a second."""

log = structlog.get_logger()


class ExpandableSegments:
    """Switches expandable segments for new allocations of this process. Use one instance per process.

    Existing allocations are not affected. Each switch is logged: a policy that shares its GPU with an engine switches
    twice in a weight sync, any other one only when it is loaded.
    """

    def __init__(self) -> None:
        self._inherited = os.environ.get(ALLOCATOR_VARIABLE, "")
        self.enabled = allocator_options(self._inherited).get("expandable_segments") == "True"

    def enable(self) -> None:
        """Enable them for new allocations. If torch refuses, logs a warning and keeps classic segments."""
        try:
            self._set(True)
        except (RuntimeError, ValueError, AttributeError) as error:
            log.warning("expandable segments stay off: torch refuses to switch them on", error=str(error))

    def disable(self) -> None:
        """Disable them for new allocations. Raises `RunError` if torch refuses: weights could not be exported."""
        try:
            self._set(False)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise RunError(
                f"expected torch to disable expandable segments for the weight sync, it refused: {error}; "
                "set memory.expandableSegments: Disabled, or memory.weightExport: ReservedBuffer"
            ) from error

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Use plain cudaMalloc within the block, then restore the previous setting. Can be nested."""
        if not self.enabled:
            yield
            return
        self.disable()
        # Free memory in expandable segments is unusable while they are disabled: release it.
        torch.cuda.empty_cache()
        try:
            yield
        finally:
            self.enable()

    def _set(self, enabled: bool) -> None:
        # Not public; torch is pinned.
        torch._C._accelerator_setAllocatorSettings(settings_with(self._inherited, expandable_segments=enabled))
        self.enabled = enabled
        log.info("expandable segments switched", enabled=enabled)


def settings_with(inherited: str, *, expandable_segments: bool) -> str:
    """The complete settings string of the allocator: the inherited one with `expandable_segments` and its page size.

    Complete, since a call that sets some options resets others to their defaults. An inherited page size is kept.
    """
    kept = [part for part in inherited.split(",") if part and not part.strip().startswith("expandable_segments")]
    settings = [*kept, f"expandable_segments:{expandable_segments}"]
    if "large_segment_size_mb" not in allocator_options(inherited):
        settings.append(f"large_segment_size_mb:{_PAGE_MIB if expandable_segments else _DEFAULT_PAGE_MIB}")
    return ",".join(settings)


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
