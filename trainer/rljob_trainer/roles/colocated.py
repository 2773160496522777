"""The policy ranks and rollout engines of a job whose roles share their GPUs, as one object the controller calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rljob_trainer.errors import WorkerLost
from rljob_trainer.hardware import Device
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.result import UpdateResult
from rljob_trainer.roles.actor import RoleHandle, spawn
from rljob_trainer.roles.calls import Calls, wait_for
from rljob_trainer.roles.placement import Bundle
from rljob_trainer.rollout.config import RolloutConfig
from rljob_trainer.rollouts import Completion, Prompt, RolloutBatch
from rljob_trainer.telemetry.memory import MemorySample

POLICY = "rljob_trainer.roles.policy_actor:PolicyActor"
ENGINE = "rljob_trainer.roles.rollout_actor:RolloutActor"

_PLACEMENT_SECONDS = 60
"""The room is there when it is asked for, but for a worker that died just then."""


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
    sync_bucket_bytes: int
    output_dir: Path
    bundles: tuple[Bundle, ...] | None


class ColocatedRoles:
    """Calls go to all actors of a role at once; each method returns when all are done, or raises the first failure."""

    def __init__(self, settings: RoleSettings) -> None:
        self._settings = settings
        self._sleeps = settings.rollout.device == "cuda" and settings.rollout.sleep_level > 0
        group = None if settings.bundles is None else _placement_group(settings.bundles)
        self._policy = self._spawn("policy", POLICY, group, settings.policy_environment)
        self._engines = self._spawn("rollout", ENGINE, group, settings.rollout_environment)

    # --- start ---

    def construct(self) -> dict[str, int]:
        """Start the processes; their ids by actor name."""
        settings = self._settings
        policy = {
            name: handle.actor.construct.remote(rank, settings.ranks, settings.policy, settings.sync_bucket_bytes)
            for rank, (name, handle) in enumerate(self._policy.items())
        }
        engines = {
            name: handle.actor.construct.remote(rank, settings.rollout, settings.output_dir)
            for rank, (name, handle) in enumerate(self._engines.items())
        }
        return wait_for({**policy, **engines}, "starting")

    def load(self) -> None:
        """Load the policy and start the engines: one after the other on GPUs, where each measures what is free."""
        host, port = wait_for({"policy-0": self._policy["policy-0"].rendezvous.remote()}, "starting")["policy-0"]
        wait_for(self._call_policy("connect", host, port), "joining the process group")
        loading = self._call_policy("load")
        if self._settings.policy.device == "cuda":
            wait_for(loading, "loading the policy")
            wait_for(self._call_engines("start"), "starting the engine")
        else:
            wait_for({**loading, **self._call_engines("start")}, "loading the policy and starting the engine")

    # --- the phases of a step ---

    def generate(
        self, step: int, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int]
    ) -> tuple[list[Completion], dict[str, MemorySample]]:
        """`group_size` completions for each prompt, group-major, and the engines' memory by actor name.

        The prompts are dealt to the engines in order.
        """
        shares = _contiguous_shares(len(prompts), len(self._engines))
        calls: Calls = {
            name: engine.generate_for_step.remote(
                step, [prompt.token_ids for prompt in prompts[share]], group_size, list(seeds[share])
            )
            for (name, engine), share in zip(self._engines.items(), shares, strict=True)
            if share.start < share.stop
        }
        generated = wait_for(calls, "generating")
        completions = [completion for completions, _ in generated.values() for completion in completions]
        return completions, {name: memory for name, (_, memory) in generated.items()}

    def update(self, batch: RolloutBatch) -> dict[str, UpdateResult]:
        """One step's update on all ranks, with the engines asleep. Results by actor name; the metrics of all agree."""
        import ray

        if self._sleeps:
            wait_for(self._call_engines("sleep"), "going to sleep")
        # For one rank Ray decides by size whether a batch goes through shared memory; for several it shall do so once.
        given = batch if len(self._policy) == 1 else ray.put(batch)
        return wait_for(self._call_policy("update", given), "updating")

    def sync(self, version: int) -> None:
        """Bring the policy's weights to every engine, and wake them where they slept."""
        if self._sleeps:
            wait_for(self._call_engines("wake_weights"), "waking the weights")
        wait_for(self._call_policy("sync", list(self._engines.values()), version), "syncing the weights")
        if self._sleeps:
            wait_for(self._call_engines("wake_kv_cache"), "waking the KV cache")

    # --- checkpoints ---

    def start_checkpoint(self, directory: Path) -> None:
        """Begin to write the state; it is copied when this returns, and durable when `finish_checkpoint` returns."""
        wait_for(self._call_policy("start_checkpoint", directory), "starting a checkpoint")

    def checkpoint_written(self) -> bool:
        """Whether `finish_checkpoint` would return at once."""
        return all(wait_for(self._call_policy("checkpoint_written"), "writing a checkpoint").values())

    def finish_checkpoint(self) -> None:
        wait_for(self._call_policy("finish_checkpoint"), "writing a checkpoint")

    def load_checkpoint(self, directory: Path) -> None:
        wait_for(self._call_policy("load_checkpoint", directory), "loading a checkpoint")

    def export_pretrained(self, directory: Path) -> None:
        """Write the policy in Hugging Face format."""
        wait_for(self._call_policy("export_pretrained", directory), "exporting the model")

    # --- how ---

    def _call_policy(self, method: str, *args: Any) -> Calls:
        return {name: getattr(actor, method).remote(*args) for name, actor in self._policy.items()}

    def _call_engines(self, method: str, *args: Any) -> Calls:
        return {name: getattr(actor, method).remote(*args) for name, actor in self._engines.items()}

    def _spawn(self, role: str, class_name: str, group: Any, environment: dict[str, str]) -> dict[str, RoleHandle]:
        names = [f"{role}-{rank}" for rank in range(self._settings.ranks)]
        return {
            name: spawn(
                class_name,
                self._settings.output_dir / "logs" / f"{name}.log",
                _options(rank, group, self._settings.rollout.device, environment),
            )
            for rank, name in enumerate(names)
        }


def _contiguous_shares(items: int, engines: int) -> list[slice]:
    bounds = [items * engine // engines for engine in range(engines + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _placement_group(bundles: Sequence[Bundle]) -> Any:
    from ray.util.placement_group import placement_group

    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    if not group.wait(timeout_seconds=_PLACEMENT_SECONDS):
        raise WorkerLost(
            f"Ray has not found room for {len(bundles)} ranks within {_PLACEMENT_SECONDS} s: a worker died"
        )
    return group


def _options(rank: int, group: Any, device: Device, environment: dict[str, str]) -> dict[str, Any]:
    runtime_env = {"env_vars": environment}
    if group is None:
        return {"num_cpus": 1, "runtime_env": runtime_env}
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # Half a GPU each: the policy rank and the engine of a bundle share one device.
    gpus = {"num_gpus": 0.5} if device == "cuda" else {}
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return {"num_cpus": 1, **gpus, "runtime_env": runtime_env, "scheduling_strategy": strategy}
