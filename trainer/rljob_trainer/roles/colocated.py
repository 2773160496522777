"""The policy ranks and rollout engines of a job whose roles share GPUs, as one object for the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rljob_api.plan_change import Role
from rljob_memory.sample import MemorySample
from rljob_trainer.errors import DeviceOutOfMemory, TrainerError
from rljob_trainer.hardware import Bundle
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.result import UpdateResult
from rljob_trainer.roles.calls import Calls, wait_for
from rljob_trainer.roles.role_processes import RoleProcesses, placement_group
from rljob_trainer.rollout.config import RolloutConfig
from rljob_trainer.rollout_batch import Completion, Prompt, RolloutBatch

POLICY = "rljob_trainer.roles.policy_actor:PolicyActor"
ENGINE = "rljob_trainer.roles.rollout_actor:RolloutActor"


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Settings of the role processes."""

    ranks: int
    """Policy ranks, and rollout engines: one of each per GPU."""

    policy: PolicyConfig

    rollout: RolloutConfig

    policy_environment: dict[str, str]
    """Environment variables of the policy processes."""

    rollout_environment: dict[str, str]
    """Environment variables of the engine processes."""

    output_dir: Path

    bundles: tuple[Bundle, ...] | None
    """The Ray resources that each rank and its engine request together; None: they may run anywhere."""


class ColocatedRoles:
    """Calls all actors of a role at once. Each method returns when all are done, or raises the first failure."""

    def __init__(self, settings: RoleSettings, clock: PartClock) -> None:
        """`clock`: measures the parts of a start-up."""
        self.settings = settings
        self.policy_at: int | None = None
        """The policy has the weights after the update of this step; 0: the initial weights. None: unknown, since
        nothing is loaded or an update was interrupted."""
        self.engines_at: int | None = None
        """The same for the weights of the engines."""
        self.clock = clock
        group = placement_group(settings.bundles)
        of_all = (settings.ranks, settings.rollout.device, group, settings.output_dir / "logs")
        self.policy = RoleProcesses("policy", POLICY, *of_all)
        self.engines = RoleProcesses("rollout", ENGINE, *of_all)

    # --- start, change and stop ---

    def construct(self) -> dict[str, int]:
        """Start the processes that are not up. Returns their process ids by actor name."""
        settings = self.settings
        calls: Calls = {}
        with self.clock.part("processes"):
            if not self.policy.started:
                self.policy.start(settings.policy_environment)
                calls |= self.policy.construct(settings.ranks, settings.policy)
            if not self.engines.started:
                self.engines.start(settings.rollout_environment)
                calls |= self.engines.construct(settings.rollout, settings.output_dir)
                self.engines.call("import_engine")  # not waited for: meanwhile the policy loads
            return wait_for(calls, "starting")

    @property
    def up(self) -> bool:
        """True if both roles are ready to work."""
        return self.policy.loaded and self.engines.loaded

    def load(self) -> None:
        """Load the roles: the policy with its initial weights, the engines without weights."""
        self._begin_loading_policy()
        if self._on_gpu or self.engines.loaded:
            # On a GPU one after the other, since each measures free memory.
            self._finish_loading_policy()
        if not self.engines.loaded:
            self._begin_loading_engines()
            with self.clock.part("engine"):
                wait_for({**self.policy.loading, **self.engines.loading}, "loading the policy and starting the engine")
            self.engines.loaded = True
            self._finish_loading_policy()

    def change(self, settings: RoleSettings) -> None:
        """Use `settings` for new processes; a running policy applies the memory settings that it can."""
        self.settings = settings
        if self.policy.loaded:
            wait_for(self.policy.call("change_memory", settings.policy.memory), "changing the policy's memory settings")
        elif self.policy.started:
            self.end("policy")  # it was constructed with the previous settings

    def end(self, role: Role) -> None:
        """Stop the processes of a role and free their memory. New ones can then be constructed."""
        if role == "policy":
            self.policy.end()
            self.policy_at = None
        else:
            self.engines.end()
            self.engines_at = None

    # --- the phases of a step ---

    def generate(
        self, step: int, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int]
    ) -> tuple[list[Completion], dict[str, MemorySample]]:
        """`group_size` completions for each prompt, group-major, and the engines' memory by actor name.

        Each engine gets a contiguous share of the prompts.
        """
        shares = _contiguous_shares(len(prompts), len(self.engines))
        calls: Calls = {
            name: engine.generate_for_step.remote(
                step, [prompt.token_ids for prompt in prompts[share]], group_size, list(seeds[share])
            )
            for (name, engine), share in zip(self.engines.handles.items(), shares, strict=True)
            if share.start < share.stop
        }
        generated = wait_for(calls, "generating")
        completions = [completion for completions, _ in generated.values() for completion in completions]
        return completions, {name: memory for name, (_, memory) in generated.items()}

    def update(self, batch: RolloutBatch) -> dict[str, UpdateResult]:
        """Update the policy on all ranks, while the engines sleep. Results by actor name; their metrics are equal.

        If it fails, `policy_at` states whether the policy is unchanged.
        """
        import ray

        self._put_engines_to_sleep()
        # For one rank, Ray decides by size whether a batch uses shared memory. For several, it is stored there once.
        given = batch if len(self.policy) == 1 else ray.put(batch)
        before, self.policy_at = self.policy_at, None
        try:
            results = wait_for(self.policy.call("update", given), "updating")
        except DeviceOutOfMemory:
            self.policy_at = before if self._update_left_the_policy_alone() else None
            raise
        self.policy_at = batch.step
        return results

    def sync(self, version: int) -> None:
        """Send the policy's weights to every engine. Engines that sleep are woken."""
        self.engines_at = None
        if self._sleeps:
            wait_for(self.engines.call("wake_weights"), "waking the weights")
        wait_for(self.policy.call("sync", list(self.engines.handles.values()), version), "syncing the weights")
        if self._sleeps:
            wait_for(self.engines.call("wake_kv_cache"), "waking the KV cache")
        self.engines_at = version

    # --- checkpoints ---

    def start_checkpoint(self, directory: Path) -> None:
        """Start writing the state. It is copied when this returns, and durable when `finish_checkpoint` returns."""
        wait_for(self.policy.call("start_checkpoint", directory), "starting a checkpoint")

    def checkpoint_written(self) -> bool:
        """True if `finish_checkpoint` would return at once."""
        return all(wait_for(self.policy.call("checkpoint_written"), "writing a checkpoint").values())

    def finish_checkpoint(self) -> None:
        wait_for(self.policy.call("finish_checkpoint"), "writing a checkpoint")

    def load_checkpoint(self, directory: Path, step: int) -> None:
        """Load the checkpoint of `step` in `directory` into the policy."""
        self.policy_at = None
        wait_for(self.policy.call("load_checkpoint", directory), "loading a checkpoint")
        self.policy_at = step

    def export_pretrained(self, directory: Path) -> None:
        """Write the policy in Hugging Face format."""
        wait_for(self.policy.call("export_pretrained", directory), "exporting the model")

    # --- how ---

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

    def _begin_loading_policy(self) -> None:
        if self.policy.loading:
            return
        if self.engines.loaded:
            self._put_engines_to_sleep()
        with self.clock.part("policy"):
            [(host, port)] = wait_for(self.policy.call_first("rendezvous"), "starting").values()
            wait_for(self.policy.call("connect", host, port), "joining the process group")
            self.policy.loading = self.policy.call("load")

    def _finish_loading_policy(self) -> None:
        if self.policy.loaded:
            return
        with self.clock.part("policy"):
            wait_for(self.policy.loading, "loading the policy")
        self.policy.loaded, self.policy_at = True, 0

    def _begin_loading_engines(self) -> None:
        if not self.engines.loading:
            self.engines.loading = self.engines.call("start")

    def _update_left_the_policy_alone(self) -> bool:
        """True if no optimizer step has started. Unknown for several ranks: they may wait in a collective."""
        if len(self.policy) > 1:
            return False
        try:
            [touched] = wait_for(self.policy.call("parameters_touched"), "checking the progress of the update").values()
        except TrainerError:
            return False
        return not touched


def _contiguous_shares(items: int, engines: int) -> list[slice]:
    bounds = [items * engine // engines for engine in range(engines + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
