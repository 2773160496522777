"""`expandable_segments`: segments of the caching allocator that grow, so that changing lengths leave nothing unusable.

They are for the policy's own work. What other processes shall read (CUDA IPC) must lie in classic segments: expandable
ones can only be exported with privileges that a container does not have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import torch

from rljob_memory.allocator import ALLOCATOR_VARIABLE, torch_release
from rljob_memory.allocator_settings import allocator_options
from rljob_trainer.errors import TrainerError

_PAGE_MIB, _DEFAULT_PAGE_MIB = 256, 20
"""Expandable segments grow and shrink by pages. Mapping takes as long for a large page as for a small one: with torch's
own size, the flush after each update and the growth in the next one would take a third of a second for 24 GiB."""

_PAGES_SINCE_TORCH = (2, 11)

log = structlog.get_logger()


class ExpandableSegments:
    """Whether new memory of this process comes from expandable segments. One a process, as there is one allocator.

    Memory that is already handed out stays where it is, whatever is set.
    """

    def __init__(self) -> None:
        self._inherited = os.environ.get(ALLOCATOR_VARIABLE, "")
        self.enabled = allocator_options(self._inherited).get("expandable_segments") == "True"

    def enable(self) -> None:
        """From now on. Where torch refuses, memory is classic still, which is said and does no harm."""
        try:
            self._set(True)
        except (RuntimeError, ValueError, AttributeError) as error:
            log.warning("expandable segments stay off: torch refuses to switch them on", error=str(error))

    def disable(self) -> None:
        """From now on. Raises `TrainerError` where torch refuses: what is allocated next could not be exported."""
        try:
            self._set(False)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise TrainerError(
                f"expected torch to switch expandable segments off for the weight sync, it refused: {error}; "
                "set memory.expandableSegments: Disabled, or memory.weightExport: ReservedBuffer"
            ) from error

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within, new memory is plain cudaMalloc. Afterwards it is as it was before, however deep this is nested."""
        if not self.enabled:
            yield
            return
        self.disable()
        # The free part of expandable segments cannot be used while they are off: hand it back rather than strand it.
        torch.cuda.empty_cache()
        try:
            yield
        finally:
            self.enable()

    def _set(self, enabled: bool) -> None:
        settings = settings_with(self._inherited, torch_release(torch.__version__), expandable_segments=enabled)
        # The first is the name since torch 2.10, the second that of the versions before. Neither is public.
        if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
            torch._C._accelerator_setAllocatorSettings(settings)
        else:
            torch.cuda.memory._set_allocator_settings(settings)
        self.enabled = enabled


def settings_with(inherited: str, torch_version: tuple[int, int], *, expandable_segments: bool) -> str:
    """The allocator's whole settings string: the inherited one with `expandable_segments` set, and its page size.

    Whole, since each call that sets some of the allocator's options resets others to their defaults. A page size that
    is inherited stays.
    """
    kept = [part for part in inherited.split(",") if part and not part.strip().startswith("expandable_segments")]
    settings = [*kept, f"expandable_segments:{expandable_segments}"]
    if torch_version >= _PAGES_SINCE_TORCH and "large_segment_size_mb" not in allocator_options(inherited):
        settings.append(f"large_segment_size_mb:{_PAGE_MIB if expandable_segments else _DEFAULT_PAGE_MIB}")
    return ",".join(settings)
