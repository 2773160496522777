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

from rljob_trainer.policy.lora import is_adapter
from rljob_trainer.policy.model import PolicyModel, sent_name
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.weight_sync.colocated import ReservedBuffer
from rljob_trainer.weight_sync.transfer import largest_unit_bytes


class ExportingRank(PolicyRank):
    """Keeps exported weights in memory that another process on the GPU can open. On a CPU, nothing is special."""

    export_buffer: ReservedBuffer | None = None
    """Buffer for exported weights; None: a new buffer for each bucket."""

    @contextmanager
    def weights_for_export(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """The full parameters of `weights_for_sync`, in memory that another process can open (CUDA IPC): same
        shapes."""
        switches = self._on_gpu and self.export_buffer is None
        with self.weights_for_sync() as parameters, self._segments.disabled() if switches else nullcontext():
            try:
                yield parameters
            finally:
                if switches:
                    _release_exported_memory()

    def _arrange_gpu_memory(self, model: PolicyModel) -> None:
        # First, since a reserved export buffer must be in classic memory, as the weights are.
        self._arrange_export_buffer(model)
        super()._arrange_gpu_memory(model)

    def _arrange_export_buffer(self, model: PolicyModel) -> None:
        """Allocate or free the buffer as the memory plan requires. A buffer that is large enough is kept."""
        memory = self.config.memory
        if memory.weight_export != "ReservedBuffer":
            self.export_buffer = None
            return
        needed = max(memory.sync_bucket_bytes, self._largest_unit_bytes(model))
        if self.export_buffer is None or self.export_buffer.capacity_bytes < needed:
            with self._segments.disabled():
                self.export_buffer = ReservedBuffer(needed)

    def _largest_unit_bytes(self, model: PolicyModel) -> int:
        """Maximum bytes of the parameters that are sent together, in the exported dtype."""
        frozen_or_whole = ((name, each) for name, each in model.named_parameters() if not is_adapter(name))
        return largest_unit_bytes(
            (sent_name(name), parameter.numel() * self._dtype.itemsize) for name, parameter in frozen_or_whole
        )


def _release_exported_memory() -> None:
    """Release exported memory once other processes have closed its handles.

    Otherwise each export would leave another buffer behind: a small tensor that is placed in it keeps it allocated.
    """
    gc.collect(generation=0)
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
