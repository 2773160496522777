"""A policy rank as a role: it also sends its weights to the engines, and recovers from failures.

The topology decides how weights are sent.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from rljob_api.memory_plan import MemoryPlan
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.exporting_rank import ExportingRank
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.weight_sync.broadcast import WeightBroadcaster
from rljob_trainer.weight_sync.colocated import send_weights


class PolicyActor(PolicyRank):
    """The object of a policy process: the part that all topologies share."""

    def change_memory(self, memory: MemoryPlan, checkpoint_copy: bool | None = None) -> None:
        """Apply other memory settings after a failure, and free the memory that the failure left allocated."""
        # The failure's traceback, which held tensors, is gone by now except for reference cycles.
        gc.collect()
        if self.config.device == "cuda":
            torch.cuda.empty_cache()
        super().change_memory(memory, checkpoint_copy)

    # --- injected faults ---

    def begin_phase(self, phase: str) -> None:
        """Attribute the next failure to `phase`, as if the phase itself had failed."""
        self._memory_log.begin_phase(self._step, phase)

    def fail(self, fail: Callable[[], NoReturn]) -> None:
        """Call `fail` where the other ranks wait for this one."""
        with self._membership.collective():
            fail()

    def after_micro_batch(self, fail: Callable[[], NoReturn]) -> None:
        """Call `fail` after the first micro-batch of the next update, while its gradients are held."""
        _call_once(self._loaded.update, "after_micro_batch", fail)

    def after_optimizer_step(self, fail: Callable[[], NoReturn]) -> None:
        """Call `fail` after the next optimizer step, when the parameters have changed."""
        _call_once(self._loaded.optimizer, "after_step", fail)


class ColocatedPolicyActor(PolicyActor, ExportingRank):
    """A rank that shares its GPU with an engine. The engine opens the rank's memory."""

    def sync(self, engines: Sequence[Any], version: int) -> None:
        """Send every parameter to every engine, as `version`. Collective."""
        bucket_bytes = self.config.memory.sync_bucket_bytes
        with self.weights_for_export() as (parameters, staging):
            send_weights(parameters, engines, version, bucket_bytes, self.rank, staging)


class DisaggregatedPolicyActor(PolicyActor):
    """A rank with its own GPU. Rank 0 broadcasts the weights to the engines."""

    def __init__(self, rank: int, world_size: int, config: PolicyConfig) -> None:
        super().__init__(rank, world_size, config)
        self._broadcaster = WeightBroadcaster(config.device)

    def sync(self, engines: Sequence[Any], version: int) -> None:
        """Send every parameter to every engine, as `version`. Collective."""
        bucket_bytes = self.config.memory.sync_bucket_bytes
        with self.weights_for_sync() as parameters:
            self._broadcaster.send(parameters, engines if self.rank == 0 else [], version, bucket_bytes)


def _call_once(owner: Any, hook: str, fail: Callable[[], NoReturn]) -> None:
    """Replace the callback `hook` of `owner` by `fail`, until it is called."""
    original = getattr(owner, hook)

    def fail_once(*_arguments: Any) -> None:
        setattr(owner, hook, original)
        fail()

    setattr(owner, hook, fail_once)
