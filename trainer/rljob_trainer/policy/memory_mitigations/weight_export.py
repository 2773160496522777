"""`weight_export`: classic memory for weights that another process reads (CUDA IPC).

`SwitchSegments` allocates a buffer for each bucket, and disables expandable segments during the sync.
`ReservedBuffer` keeps one buffer, allocated while they were disabled: it neither switches nor releases the cache.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rljob_api.memory_plan import MemoryPlan
from rljob_trainer.policy.memory_mitigations.expandable_segments import ExpandableSegments
from rljob_trainer.weight_sync.ipc import ReservedBuffer


class WeightExport:
    """The memory for a policy rank's weight syncs on a GPU."""

    def __init__(self, segments: ExpandableSegments, largest_unit_bytes: int) -> None:
        """`largest_unit_bytes`: of the parameters that are sent together, in the exported dtype."""
        self._segments = segments
        self._largest_unit_bytes = largest_unit_bytes
        self.buffer: ReservedBuffer | None = None

    def arrange(self, memory: MemoryPlan) -> None:
        """Allocate or free the buffer as `memory` requires. A buffer that is large enough is kept."""
        if memory.weight_export != "ReservedBuffer":
            self.buffer = None
            return
        needed = max(memory.sync_bucket_bytes, self._largest_unit_bytes)
        if self.buffer is None or self.buffer.capacity_bytes < needed:
            with self._segments.disabled():
                self.buffer = ReservedBuffer(needed)

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """Within the block, weights can be exported: from the kept buffer, or from new allocations."""
        if self.buffer is not None:
            yield
            return
        with self._segments.disabled():
            try:
                yield
            finally:
                _release_exported_memory()


def _release_exported_memory() -> None:
    """Release exported memory once other processes have closed its handles.

    Otherwise each export would leave another buffer behind: a small tensor that is placed in it keeps it allocated.
    """
    gc.collect(generation=0)
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
