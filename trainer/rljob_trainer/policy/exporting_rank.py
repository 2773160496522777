"""A policy rank that shares its GPU with an engine, which opens the rank's memory to read the weights (CUDA IPC)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor

from rljob_trainer.policy.lora import is_adapter
from rljob_trainer.policy.memory_mitigations.weight_export import WeightExport
from rljob_trainer.policy.model import PolicyModel, sent_name
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.weight_sync.ipc import ReservedBuffer
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
