"""A copy of the state before an update, in host memory, used to undo an interrupted update.

On a GPU, the copy is made during the forward and backward passes, which do not change the state; the first optimizer
step waits until it is complete.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from rljob_trainer.policy.gradients import local
from rljob_trainer.policy.host_array import HostArray, parts_bytes, parts_like
from rljob_trainer.policy.optimizer import MasterAdamW


class StateSnapshot:
    """Copy of one rank's shards: trained weights, and the optimizer's state."""

    def __init__(self, optimizer: MasterAdamW) -> None:
        self._optimizer = optimizer
        self._sources: list[Tensor] = []
        """Sources of a copy in progress: FSDP replaces the shards in its first pass."""
        self._steps: int | None = None
        device = optimizer.state.arrays()["exp_avg"].device
        self._device: Any = torch.get_device_module(device)
        self._stream = self._device.Stream()
        self._kept = HostArray(
            parts_bytes(self._state()),
            torch.uint8,
            pinned=device.type == "cuda",
            purpose="a snapshot of the policy's state",
            advice="run without it: a failure in an optimizer step then replaces the policy's processes",
        )

    @property
    def taken(self) -> bool:
        """True if `restore` brings back the state at the latest `begin`."""
        return self._steps is not None

    def begin(self) -> None:
        """Start to copy the state. A state that has been offloaded since is not copied: there is no room for it."""
        self._steps = None
        if self._optimizer.state.offloaded or not self._has_memory():
            return
        self._sources = self._state()
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            for source, kept in zip(self._sources, parts_like(self._sources, self._kept.tensor), strict=True):
                kept.copy_(source, non_blocking=True)
        self._steps = self._optimizer.steps

    def complete(self) -> None:
        """Make subsequent work wait for the copy. Call it before the state changes."""
        self._device.current_stream().wait_stream(self._stream)
        self._sources = []

    def restore(self) -> None:
        """Bring the state back. Allocates no memory."""
        assert self._steps is not None, "no snapshot was taken"
        self.complete()
        state = self._state()
        for target, kept in zip(state, parts_like(state, self._kept.tensor), strict=True):
            target.copy_(kept)
        self._optimizer.steps = self._steps

    def _has_memory(self) -> bool:
        """False if the host lacks the memory: the job can continue without a snapshot."""
        try:
            return self._kept.tensor is not None
        except RuntimeError as error:
            print(f"no snapshot is kept: {error}", file=sys.stderr, flush=True)
            return False

    def _state(self) -> list[Tensor]:
        """The shards of the trained weights, and the optimizer's arrays."""
        shards = [local(parameter) for parameter in self._optimizer.parameters.values()]
        return [*shards, *self._optimizer.state.arrays().values()]
