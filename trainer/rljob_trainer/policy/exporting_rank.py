"""A policy rank that shares its GPU with an engine, which opens the rank's memory to read the weights (CUDA IPC).

The engine reads the weights of a single rank where they are. Gathered weights, those with an adapter, and weights that
leave the GPU while the engine generates (`policyOffload`), are copied to buffers: `weightExport: ReservedBuffer` keeps
them; with `SwitchSegments` they exist in a sync only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rljob_trainer.policy.lora import is_adapter
from rljob_trainer.policy.model import PolicyModel, sent_name
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.weight_sync.colocated import Staging
from rljob_trainer.weight_sync.transfer import largest_unit_bytes


class ExportingRank(PolicyRank):
    """Keeps exported weights in memory that another process on the GPU can open. On a CPU, nothing is special."""

    _kept: Staging | None = None
    """Buffers of `weightExport: ReservedBuffer`."""

    @contextmanager
    def weights_for_export(self) -> Iterator[tuple[Iterator[tuple[str, Tensor]], Staging | None]]:
        """The full parameters of `weights_for_sync`, in the same shapes, and the buffers to copy them to; None: another
        process can open them."""
        with self.weights_for_sync() as parameters:
            if not self._stages or self._kept is not None:
                yield parameters, self._kept
                return
            staging = self._staging(self._staged_bytes(self._model), is_kept=False)
            try:
                yield parameters, staging
            finally:
                staging.free()
                torch.cuda.empty_cache()

    def _arrange_gpu_memory(self, model: PolicyModel) -> None:
        # First, since a kept buffer must be in classic memory, as the weights are.
        self._arrange_kept_buffers(model)
        super()._arrange_gpu_memory(model)

    def _arrange_kept_buffers(self, model: PolicyModel) -> None:
        """Allocate or free the buffers as the memory plan requires. Buffers that are large enough are kept."""
        if not self._stages or self.config.memory.weight_export != "ReservedBuffer":
            self._kept = None
            return
        needed = self._staged_bytes(model)
        if self._kept is None or self._kept.capacity_bytes < needed:
            self._kept = None
            self._kept = self._staging(needed, is_kept=True)

    @property
    def _stages(self) -> bool:
        in_place = self.world_size == 1 and self.config.lora is None and not self.config.memory.policy_offload
        return self._on_gpu and not in_place

    def _staging(self, capacity_bytes: int, *, is_kept: bool) -> Staging:
        with self._segments.disabled():
            return Staging(capacity_bytes, is_kept=is_kept)

    def _staged_bytes(self, model: PolicyModel) -> int:
        """Bytes of a buffer: a bucket, or the parameters that are sent together in the exported dtype."""
        whole = ((name, each) for name, each in model.named_parameters() if not is_adapter(name))
        unit = largest_unit_bytes((sent_name(name), each.numel() * self._dtype.itemsize) for name, each in whole)
        return max(self.config.memory.sync_bucket_bytes, unit)
