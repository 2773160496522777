"""A policy rank that shares its GPU with an engine, which opens the rank's memory to read the weights (CUDA IPC).

`weightExport: SwitchSegments` allocates a buffer for each bucket, and disables expandable segments during the sync.
`ReservedBuffer` keeps one buffer, allocated while they were disabled: it neither switches nor releases the cache.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from rljob_api.memory_plan import MemoryPlan
from rljob_trainer.policy.caching_allocator import ExpandableSegments
from rljob_trainer.policy.lora import is_adapter
from rljob_trainer.policy.model import PolicyModel, sent_name
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.weight_sync.colocated import ReservedBuffer
from rljob_trainer.weight_sync.transfer import largest_unit_bytes


class ExportingRank(PolicyRank):
    """Keeps exported weights in memory that another process on the GPU can open. On a CPU, nothing is special."""

    _weight_export: WeightExport | None = None

    @contextmanager
    def weights_for_export(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """`weights_for_sync`, in memory that another process can open (CUDA IPC)."""
        exporting = nullcontext() if self._weight_export is None else self._weight_export.exporting()
        with self.weights_for_sync() as parameters, exporting:
            yield parameters

    @property
    def export_buffer(self) -> ReservedBuffer | None:
        """The buffer for exported weights; None: a new one for each bucket."""
        return None if self._weight_export is None else self._weight_export.buffer

    def _arrange_gpu_memory(self, model: PolicyModel) -> None:
        if self._weight_export is None:
            self._weight_export = WeightExport(self._segments, self._largest_unit_bytes(model))
        # First, since a reserved export buffer must be in classic memory, as the weights are.
        self._weight_export.arrange(self.config.memory)
        super()._arrange_gpu_memory(model)

    def _largest_unit_bytes(self, model: PolicyModel) -> int:
        frozen_or_whole = ((name, each) for name, each in model.named_parameters() if not is_adapter(name))
        return largest_unit_bytes(
            (sent_name(name), parameter.numel() * self._dtype.itemsize) for name, parameter in frozen_or_whole
        )


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
