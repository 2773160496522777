"""`weight_export`: where the weights lie while another process reads them (CUDA IPC). In classic memory, in two ways.

`SwitchSegments` makes a buffer for each bucket, with expandable segments off for as long as the sync takes.
`ReservedBuffer` keeps one buffer for good, made while they were off: no switch, and no flush of the cache.
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

    def __init__(self, segments: ExpandableSegments, largest_parameter_bytes: int) -> None:
        """`largest_parameter_bytes`: as it is exported."""
        self._segments = segments
        self._largest_parameter_bytes = largest_parameter_bytes
        self.buffer: ReservedBuffer | None = None

    def arrange(self, memory: MemoryPlan) -> None:
        """Make the buffer that `memory` asks for, or let go of it. One that is large enough is kept as it is."""
        if memory.weight_export != "ReservedBuffer":
            self.buffer = None
            return
        needed = max(memory.sync_bucket_bytes, self._largest_parameter_bytes)
        if self.buffer is None or self.buffer.capacity_bytes < needed:
            with self._segments.disabled():
                self.buffer = ReservedBuffer(needed)

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """Within, weights can be exported: from the kept buffer, or from whatever is allocated meanwhile."""
        if self.buffer is not None:
            yield
            return
        with self._segments.disabled():
            try:
                yield
            finally:
                _release_exported_memory()


def _release_exported_memory() -> None:
    """Give memory back whose handles other processes had, once they have let go of it.

    Left to the allocator, each export would strand another buffer: a small tensor that moves into it keeps it for good.
    """
    gc.collect(generation=0)
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
