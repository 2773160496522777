"""A policy rank as a role: it also sends its weights to the engines, and recovers from failures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from rljob_api.memory_plan import MemoryPlan
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.weight_sync import send_weights


class PolicyActor(PolicyRank):
    """The object of a policy process: the rank, with the sending side of the weight sync."""

    def sync(self, engines: Sequence[Any], version: int) -> None:
        """Send every parameter to every engine, as `version`. Collective."""
        bucket_bytes = self.config.memory.sync_bucket_bytes
        with self.weights_for_export() as parameters:
            send_weights(parameters, engines, version, bucket_bytes, self.rank, self.export_buffer)

    def change_memory(self, memory: MemoryPlan) -> None:
        """Apply other memory settings after a failure, and free the memory that it left behind."""
        # The failure's traceback, which held tensors, is gone by now except for reference cycles.
        gc.collect()
        if self.config.device == "cuda":
            torch.cuda.empty_cache()
        super().change_memory(memory)

    # --- injected faults ---

    def begin_phase(self, phase: str) -> None:
        """Attribute the failure that follows to `phase`, as if the phase had failed by itself."""
        self._memory_log.begin_phase(self._step, phase)

    def after_micro_batch(self, fail: Callable[[], NoReturn]) -> None:
        """Call `fail` after the first micro-batch of the next update, while its gradients are held."""
        original = self._update.after_micro_batch

        def fail_once(_number: int) -> None:
            self._update.after_micro_batch = original
            fail()

        self._update.after_micro_batch = fail_once

    def after_optimizer_step(self, fail: Callable[[], NoReturn]) -> None:
        """Call `fail` after each optimizer step, when the parameters have changed."""

        def fail_after(_optimizer: object, _arguments: object, _options: object) -> None:
            fail()

        self._optimizer.register_step_post_hook(fail_after)
