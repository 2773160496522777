"""The roles of each topology: `ColocatedRoles` if policy ranks and engines share GPUs, otherwise `Roles`."""

from __future__ import annotations

from pathlib import Path

from rljob_api.plan_change import Role
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.policy.config import UpdateResult
from rljob_trainer.roles.calls import Calls
from rljob_trainer.roles.role_processes import RoleSettings
from rljob_trainer.roles.roles import Roles
from rljob_trainer.rollout_batch import RolloutBatch


def roles_of(settings: RoleSettings, clock: PartClock) -> Roles:
    """The roles of a job, without processes. `clock`: measures the parts of a start-up."""
    return (ColocatedRoles if settings.topology == "Colocated" else Roles)(settings, clock)


class ColocatedRoles(Roles):
    """One policy rank and one engine process per GPU, which take turns. The engine sleeps while the policy learns.

    With `policyOffload`, the policy's weights are in host memory while the engine has its KV cache. Ranks load them
    back when they need them; the caller puts the engine to sleep first.
    """

    policy_class = "rljob_trainer.roles.policy_actor:ColocatedPolicyActor"
    engine_class = "rljob_trainer.roles.rollout_actor:ColocatedRolloutActor"

    _half_awake = False
    """The engines have their weights on the GPU, and not their KV cache. vLLM 0.26 can put to sleep only both."""

    def end(self, role: Role) -> None:
        """Stop a role. Engines that cannot sleep end with the policy: the next policy needs their memory to load."""
        super().end(role)
        if role == "policy" and self._half_awake:
            super().end("rollout")
        self._half_awake = False

    def load(self) -> None:
        """Load the roles, as with separate GPUs. With `policyOffload`, the policy makes room before the engines
        start."""
        if self.engines.loaded and not self.policy.loading:
            self.engines.results("forget_policy", doing="closing the memory of the former policy")
            self._put_engines_to_sleep()
        self._begin_loading_policy()
        if self._offloads:
            self._finish_loading_policy()
            if not self.engines.loaded:
                self._offload_policy("load")
        self._load_engines()
        self._finish_loading_policy()

    def update(self, batch: RolloutBatch, added: int = 0, adding: Calls | None = None) -> dict[str, UpdateResult]:
        self._put_engines_to_sleep()
        return super().update(batch, added, adding)

    def sync(self, version: int) -> None:
        """Sync, as with separate GPUs. An engine that sleeps has only its weights on the GPU during the transfer."""
        self.engines_at = None
        if self.engines_sleep:
            self._put_engines_to_sleep()
            self._half_awake = True
            self.engines.results("wake_weights", doing="waking the weights")
        super().sync(version)
        if self._offloads:
            self.engines_at = None
            self._offload_policy("sync")
        if self.engines_sleep:
            self.engines_at = None
            self.engines.results("wake_kv_cache", doing="waking the KV cache")
            self._half_awake = False
        self.engines_at = version

    def load_checkpoint(self, directory: Path, step: int) -> str | None:
        self._make_room_for_weights()
        return super().load_checkpoint(directory, step)

    def export_pretrained(self, directory: Path) -> None:
        """Write the policy, as with separate GPUs. The engines cannot generate afterwards until the next sync."""
        self._make_room_for_weights()
        super().export_pretrained(directory)

    @property
    def engines_sleep(self) -> bool:
        return self.settings.policy.device == "cuda" and self.settings.rollout.sleep_level > 0

    @property
    def _offloads(self) -> bool:
        return self.settings.policy.memory.policy_offload

    def _offload_policy(self, phase: str) -> None:
        self._call_policy("offload_weights", phase, doing="moving the policy's weights to host memory")

    def _make_room_for_weights(self) -> None:
        if self._offloads:
            self._put_engines_to_sleep()

    def _put_engines_to_sleep(self) -> None:
        if self.engines_sleep:
            self.engines_at = None
            self.engines.results("sleep", doing="going to sleep")
