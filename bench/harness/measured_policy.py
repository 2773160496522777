"""The policy's actor with one more control than the trainer needs."""

from __future__ import annotations

from dataclasses import replace

from rljob_trainer.roles.policy_actor import ColocatedPolicyActor


class MeasuredPolicy(ColocatedPolicyActor):
    """A policy rank whose micro-batches can change size while its allocator keeps its cache."""

    def use_budget(self, micro_batch_tokens: int) -> None:
        memory = self.config.memory.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
        self.config = self._loaded.update.config = replace(self.config, memory=memory)
