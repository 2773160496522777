"""Colocated roles: a policy rank and an engine take turns on each GPU. The engine sleeps while the policy learns."""

from __future__ import annotations

from rljob_trainer.policy.result import UpdateResult
from rljob_trainer.roles.calls import wait_for
from rljob_trainer.roles.roles import Roles
from rljob_trainer.rollout_batch import RolloutBatch


class ColocatedRoles(Roles):
    """One policy rank and one engine process per GPU."""

    policy_class = "rljob_trainer.roles.policy_actor:ColocatedPolicyActor"
    engine_class = "rljob_trainer.roles.rollout_actor:ColocatedRolloutActor"

    def load(self) -> None:
        if self.engines.loaded and not self.policy.loading:
            self._put_engines_to_sleep()
        self._begin_loading_policy()
        if self._on_gpu or self.engines.loaded:
            # On a GPU one after the other, since each measures free memory.
            self._finish_loading_policy()
        self._load_engines()
        self._finish_loading_policy()

    def update(self, batch: RolloutBatch) -> dict[str, UpdateResult]:
        self._put_engines_to_sleep()
        return super().update(batch)

    def sync(self, version: int) -> None:
        """As in every topology. Of an engine that sleeps, only the weights are on the GPU meanwhile."""
        self.engines_at = None
        if self._sleeps:
            self._put_engines_to_sleep()
            wait_for(self.engines.call("wake_weights"), "waking the weights")
        super().sync(version)
        if self._sleeps:
            self.engines_at = None
            wait_for(self.engines.call("wake_kv_cache"), "waking the KV cache")
            self.engines_at = version

    @property
    def _on_gpu(self) -> bool:
        return self.settings.policy.device == "cuda"

    @property
    def _sleeps(self) -> bool:
        return self._on_gpu and self.settings.rollout.sleep_level > 0

    def _put_engines_to_sleep(self) -> None:
        if self._sleeps:
            self.engines_at = None
            wait_for(self.engines.call("sleep"), "going to sleep")
