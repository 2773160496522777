"""The policy ranks and rollout engines of a job whose roles share their GPUs, as one object the controller calls."""

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
    """What the roles are made of. `ranks`: policy ranks, and as many rollout engines, one of each on a GPU.

    `bundles[r]`: what rank r and engine r ask Ray for together; None where they may run anywhere.
    """

    ranks: int
    policy: PolicyConfig
    rollout: RolloutConfig
    policy_environment: dict[str, str]
    rollout_environment: dict[str, str]
    output_dir: Path
    bundles: tuple[Bundle, ...] | None


class ColocatedRoles:
    """Calls go to all actors of a role at once; each method returns when all are done, or raises the first failure.

    `policy_at`: the step after whose update the policy's weights are, 0 for those it began with; None where they are
    unknown: nothing is loaded, or an update ended halfway. `engines_at`: the same of the engines' weights.
    """

    def __init__(self, settings: RoleSettings, clock: PartClock) -> None:
        """`clock`: counts what the parts of bringing roles up take."""
        self.settings = settings
        self.policy_at: int | None = None
        self.engines_at: int | None = None
        self.clock = clock
        group = placement_group(settings.bundles)
        of_all = (settings.ranks, settings.rollout.device, group, settings.output_dir / "logs")
        self.policy = RoleProcesses("policy", POLICY, *of_all)
        self.engines = RoleProcesses("rollout", ENGINE, *of_all)

    # --- start, change and end ---

    def construct(self) -> dict[str, int]:
        """Start the processes that are not up; their ids by actor name."""
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
        """Whether both roles are there to work."""
        return self.policy.loaded and self.engines.loaded

    def load(self) -> None:
        """Make what was constructed ready: the policy with the weights that it begins with, the engines with none."""
        self._begin_loading_policy()
        if self._on_gpu or self.engines.loaded:
            # On a GPU one after the other, since each measures what is free.
            self._finish_loading_policy()
        if not self.engines.loaded:
            self._begin_loading_engines()
            with self.clock.part("engine"):
                wait_for({**self.policy.loading, **self.engines.loading}, "loading the policy and starting the engine")
            self.engines.loaded = True
            self._finish_loading_policy()

    def change(self, settings: RoleSettings) -> None:
        """Settings for processes that start from now on; a policy that stays up takes what a live process can."""
        self.settings = settings
        if self.policy.loaded:
            wait_for(self.policy.call("change_memory", settings.policy.memory), "changing the policy's memory settings")
        elif self.policy.started:
            self.end("policy")  # it was made under the settings before

    def end(self, role: Role) -> None:
        """End a role's processes, with whatever they hold; others can then be constructed."""
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

        The prompts are dealt to the engines in order.
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
        """One step's update on all ranks, with the engines asleep. Results by actor name; the metrics of all agree.

        Where it fails, `policy_at` says whether the policy is still what it was.
        """
        import ray

        self._put_engines_to_sleep()
        # For one rank Ray decides by size whether a batch goes through shared memory; for several it shall do so once.
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
        """Bring the policy's weights to every engine, and wake them where they slept."""
        self.engines_at = None
        if self._sleeps:
            wait_for(self.engines.call("wake_weights"), "waking the weights")
        wait_for(self.policy.call("sync", list(self.engines.handles.values()), version), "syncing the weights")
        if self._sleeps:
            wait_for(self.engines.call("wake_kv_cache"), "waking the KV cache")
        self.engines_at = version

    # --- checkpoints ---

    def start_checkpoint(self, directory: Path) -> None:
        """Begin to write the state; it is copied when this returns, and durable when `finish_checkpoint` returns."""
        wait_for(self.policy.call("start_checkpoint", directory), "starting a checkpoint")

    def checkpoint_written(self) -> bool:
        """Whether `finish_checkpoint` would return at once."""
        return all(wait_for(self.policy.call("checkpoint_written"), "writing a checkpoint").values())

    def finish_checkpoint(self) -> None:
        wait_for(self.policy.call("finish_checkpoint"), "writing a checkpoint")

    def load_checkpoint(self, directory: Path, step: int) -> None:
        """Set the policy to the checkpoint in `directory`, which is of `step`."""
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
        """Whether no optimizer step was begun. With several ranks there is no asking: they may sit in a collective."""
        if len(self.policy) > 1:
            return False
        try:
            [touched] = wait_for(self.policy.call("parameters_touched"), "asking how far the update came").values()
        except TrainerError:
            return False
        return not touched


def _contiguous_shares(items: int, engines: int) -> list[slice]:
    bounds = [items * engine // engines for engine in range(engines + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
