"""A policy rank as a role: it can also send its weights to the engines, and recover from a failure."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from rljob_api.memory_plan import MemoryPlan
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.weight_sync import send_weights


class PolicyActor(PolicyRank):
    """What a policy process holds: the rank, and the sending side of the weight sync."""

    def sync(self, engines: Sequence[Any], version: int) -> None:
        """Send every parameter to every engine, as `version`. All ranks call it, since gathering one is collective."""
        bucket_bytes = self.config.memory.sync_bucket_bytes
        with self.weights_for_export() as parameters:
            send_weights(parameters, engines, version, bucket_bytes, self.rank, self.export_buffer)

    def change_memory(self, memory: MemoryPlan) -> None:
        """Go on under other memory settings after a failure, with what it left behind freed."""
        # The failure's traceback, which held its tensors, is gone by now but for reference cycles.
        gc.collect()
        if self.config.device == "cuda":
            torch.cuda.empty_cache()
        super().change_memory(memory)

    # --- failing on purpose ---

    def begin_phase(self, phase: str) -> None:
        """What happens next is of `phase`, as it would be where the phase fails by itself."""
        self._memory_log.begin_phase(self._step, phase)

    def after_micro_batch(self, fail: Callable[[], NoReturn]) -> None:
        """Call `fail` when the first micro-batch of the next update is done, and its gradients wait for the others."""
        go_on = self._update.after_micro_batch

        def fail_once(_number: int) -> None:
            self._update.after_micro_batch = go_on
            fail()

        self._update.after_micro_batch = fail_once

    def after_optimizer_step(self, fail: Callable[[], NoReturn]) -> None:
        """Call `fail` when the optimizer has changed the parameters, from the next update on."""

        def fail_after(_optimizer: object, _arguments: object, _options: object) -> None:
            fail()

        self._optimizer.register_step_post_hook(fail_after)
