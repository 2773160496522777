"""The policy ranks and rollout engines of a job, as one object for the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rljob_api.plan_change import Role
from rljob_client.errors import RunError
from rljob_trainer.errors import DeviceOutOfMemory, PhaseDeadlineExceeded, WorkerLost
from rljob_trainer.ledger.checkpoint_manifest import FileDigest
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.policy.config import UpdateResult
from rljob_trainer.roles.calls import Calls, wait_for
from rljob_trainer.roles.engine_processes import Engine, EngineProcesses
from rljob_trainer.roles.generation import Generation, Result, WorkQueue
from rljob_trainer.roles.ray_driver import local_ray_runs
from rljob_trainer.roles.role_processes import (
    PolicyProcesses,
    RoleResources,
    RoleSettings,
    placement_group,
    remove_placement_group,
)
from rljob_trainer.rollout.lots import EngineWork
from rljob_trainer.rollout_batch import RolloutBatch

_UPDATING = "updating"


class Roles:
    """Calls all actors of a role together. Each method returns when all are done, or raises the first failure.

    Policy ranks and engines have separate GPUs here. A subclass for another topology names other actor classes, and
    adds work before and after a phase.
    """

    policy_class = "rljob_trainer.roles.policy_actor:DisaggregatedPolicyActor"
    engine_class = "rljob_trainer.roles.rollout_actor:DisaggregatedRolloutActor"

    def __init__(self, settings: RoleSettings, clock: PartClock) -> None:
        """`clock`: measures the parts of a start-up."""
        self.settings = settings
        self.policy_at: int | None = None
        """The policy has the weights after the update of this step; 0: the initial weights. None: unknown, since
        nothing is loaded or an update was interrupted."""
        self.engines_at: int | None = None
        """The same for the weights of the engines."""
        self.engines_ended = 0
        """Times that the engines were stopped. A generation that was begun before never finishes."""
        self.may_replace: Callable[[WorkerLost], bool] = lambda _failure: False
        """Called when an engine was lost while others remain. If it returns True, the others take over its prompts, and
        a new engine starts, which gets prompts after the next sync. If its pod was lost too, the engine starts when
        the pod is back, and nothing waits for it."""
        self.clock = clock
        self._group = placement_group(settings.bundles)
        resources = RoleResources(self._group, settings.bundles, settings.gpus_per_process)
        logs = settings.output_dir / "logs"
        self.policy = PolicyProcesses(self.policy_class, settings.ranks, resources, logs)
        resources = replace(resources, first_bundle=settings.first_engine_bundle)
        self.engines = EngineProcesses(
            self.engine_class, settings.engine_processes, resources, logs, settings.rollout.tensor_parallel_size
        )
        self._configure()

    @property
    def engines_sleep(self) -> bool:
        """True if the engines sleep during an update, next to the policy on the same GPU."""
        return False

    # --- start, change and stop ---

    def construct(self) -> dict[str, int]:
        """Start the processes that do not run. Returns their process ids by actor name."""
        with self.clock.part("processes"):
            calls = {} if self.policy.started else self.policy.start()
            if not self.engines.started:
                calls |= self.engines.start()
                self.engines.call("import_engine")  # not waited for: the policy loads at the same time
            return wait_for(calls, "starting")

    @property
    def up(self) -> bool:
        """True if both roles are ready to work."""
        return self.policy.loaded and self.engines.loaded

    def load(self) -> None:
        """Load the roles: the policy with its initial weights, the engines without weights."""
        self._begin_loading_policy()
        self._load_engines()
        self._finish_loading_policy()

    def change(self, settings: RoleSettings) -> None:
        """Use `settings` for new processes; a running policy applies the memory settings that it can."""
        self.settings = settings
        self._configure()
        if self.policy.loaded:
            memory, copy = settings.policy.memory, settings.policy.checkpoint_copy
            self.policy.results("change_memory", memory, copy, doing="changing the policy's memory settings")
        elif self.policy.started:
            self.end("policy")  # it was constructed with the previous settings

    def can_start(self) -> bool:
        """True if Ray, which may have ended, can start processes."""
        return local_ray_runs()

    def rejoin_policy(self) -> None:
        """Form a new group of the policy ranks after a failure that left their processes running.

        Raises `RunError` if that fails.
        """
        with self.clock.part("rejoin"):
            self.policy.rejoin()

    def end(self, role: Role) -> None:
        """Stop the processes of a role and free their memory. New ones can then be constructed."""
        if role == "policy":
            self.policy.end()
            self.policy_at = None
        else:
            self.engines.end()
            self.engines_at = None
            self.engines_ended += 1

    def close(self) -> None:
        """Stop all processes and free their places in Ray, which may have ended."""
        with suppress(Exception):
            self.policy.end()
            self.engines.end()
            remove_placement_group(self._group)

    # --- the phases of a step ---

    def generate(
        self,
        step: int,
        queue: WorkQueue,
        work: Callable[[Sequence[int]], EngineWork],
        on_result: Callable[[int, Result], None],
    ) -> Generation[Result]:
        """Begin to generate the items of `queue` for `step`. `Generation.finish` waits for them.

        `work`: the work that generates the given items, which all processes of an engine get in the same order.
        `on_result`: called with each item and its result as soon as it is complete.
        """
        self.engines.start_returned()
        return Generation(self.engines, step, queue, work, on_result, self._replacement)

    @property
    def engine_count(self) -> int:
        """Number of engines of the job, up or not."""
        return self.settings.engine_processes // self.settings.rollout.tensor_parallel_size

    def _replacement(self, failure: WorkerLost) -> Calls | None:
        """Begin to start an engine in place of a lost one (`Generation.replacement`)."""
        engine = self.engines.engine_of(failure.actor)
        if self._leave_out(engine, failure):
            return {}
        if failure.place_lost or not self.may_replace(failure):
            return None
        self.engines_at = None
        return self.engines.restart(engine)

    def add_part(self, batch: RolloutBatch, added: int) -> Calls:
        """Begin to add the gradient of one part of a step on all ranks: the groups of `batch`. `added`: number of parts
        before it. The policy does not change; `update` adds the other parts."""
        import ray

        return self.policy.call("update", ray.put(batch), added, False)

    def drop_parts(self, adding: Calls) -> None:
        """Drop the parts of a step that were added. `adding`: the calls of the last one. A later call repeats a
        failure."""
        with suppress(RunError):
            self.policy.joined(adding, doing=_UPDATING, in_update=True)
            self.policy.results("drop_update", doing="dropping an update")

    def update(self, batch: RolloutBatch, added: int = 0, adding: Calls | None = None) -> dict[str, UpdateResult]:
        """Update the policy on all ranks. Results by actor name; their metrics are equal.

        `added`: number of parts of the step that were added before. `adding`: the calls that add the last of them. If
        it fails, `policy_at` states whether the policy is unchanged.
        """
        import ray

        stored = ray.put(batch)  # once for all ranks
        before, self.policy_at = self.policy_at, None
        try:
            self.policy.joined(adding or {}, doing=_UPDATING, in_update=True)
            results = self.policy.together("update", stored, added, doing=_UPDATING)
        except DeviceOutOfMemory:
            self.policy_at = before if self.policy.can_undo_update() else None
            raise
        self.policy_at = batch.step
        return results

    def sync(self, version: int) -> None:
        """Send the policy's weights to every engine, also to those that have started since the last sync. An engine
        does not generate until it has all weights."""
        self.engines_at = None
        self.engines.include_started(self.may_replace)
        self._leave_out_lost()
        while True:
            engines = [self.engines.handles[name] for engine in self.engines.working for name in engine]
            try:
                self._call_policy("sync", engines, version, doing="syncing the weights")
            except WorkerLost as failure:
                # Several ranks wait for each other in the failed sync.
                if len(self.policy) > 1 or not self._continue_without(failure):
                    raise
            else:
                break
        self.engines_at = version

    def _leave_out_lost(self) -> None:
        """Leave out the engines whose pods were lost since the last sync: several ranks cannot repeat a failed sync."""
        if len(self.policy) == 1 or self.settings.topology == "Colocated":
            return
        for engine in self.engines.working:
            if self.engines.has_lost_pod(engine):
                failure = WorkerLost(f"{engine[0]} died with its pod").of(engine[0])
                if not self._continue_without(failure):
                    raise failure

    def _continue_without(self, failure: WorkerLost) -> bool:
        """Leave out a lost engine. Returns True if the sync can continue with the others."""
        engine = self.engines.engine_of(failure.actor)
        others = [other for other in self.engines.working if other != engine]
        if not engine or not others or isinstance(failure, PhaseDeadlineExceeded):
            return False
        return self._leave_out(engine, failure)

    def _leave_out(self, engine: Engine, failure: WorkerLost) -> bool:
        """Leave out an engine that was lost with its pod. Returns False if the pod still exists, or also has a policy
        rank."""
        failure.place_lost = self.engines.has_lost_pod(engine)
        if not failure.place_lost or self.settings.topology == "Colocated" or not self.may_replace(failure):
            return False
        self.engines.leave_out(engine)
        return True

    # --- checkpoints ---

    def start_checkpoint(self, directory: Path) -> None:
        """Start writing the state. It may change when this returns, and is durable when `finish_checkpoint` returns."""
        self._call_policy("start_checkpoint", directory, doing="starting a checkpoint")

    def checkpoint_written(self) -> bool:
        """True if `finish_checkpoint` would not wait."""
        return all(self.policy.results("checkpoint_written", doing="writing a checkpoint").values())

    def finish_checkpoint(self) -> dict[str, FileDigest]:
        """Wait until the checkpoint is durable. Returns the digests of the files of all ranks by name."""
        digests = self.policy.results("finish_checkpoint", doing="writing a checkpoint")
        return {name: digest for files in digests.values() for name, digest in files.items()}

    def load_checkpoint(self, directory: Path, step: int) -> str | None:
        """Load the checkpoint of `step` in `directory` into the policy.

        Returns None, or a description of damage in the files; `policy_at` is then None.
        """
        self.policy_at = None
        damages = self.policy.results("load_checkpoint", directory, doing="loading a checkpoint")
        if damage := next((each for each in damages.values() if each), None):
            return str(damage)
        self.policy_at = step
        return None

    def export_pretrained(self, directory: Path) -> None:
        """Write the policy in Hugging Face format."""
        self._call_policy("export_pretrained", directory, doing="exporting the model")

    # --- internals ---

    def _configure(self) -> None:
        settings = self.settings
        self.policy.configure(settings.policy_environment, settings.ranks, settings.policy)
        self.engines.configure(settings.rollout_environment, settings.rollout, settings.output_dir)

    def _begin_loading_policy(self) -> None:
        if self.policy.loading:
            return
        with self.clock.part("policy"):
            self.policy.connect()
            self.policy.loading = self.policy.call("load")

    def _finish_loading_policy(self) -> None:
        if self.policy.loaded:
            return
        with self.clock.part("policy"):
            wait_for(self.policy.loading, "loading the policy")
        self.policy.loaded, self.policy_at = True, 0

    def _load_engines(self) -> None:
        """Start the engines, and wait for them and for a policy that is loading."""
        if self.engines.loaded:
            return
        if not self.engines.loading:
            for engine in self.engines.engines:
                self.engines.loading |= self.engines.load(engine)
        with self.clock.part("engine"):
            wait_for({**self.policy.loading, **self.engines.loading}, "loading the policy and starting the engine")
        self.engines.loaded = True

    def _call_policy(self, method: str, *arguments: Any, doing: str) -> None:
        """Call a method of the policy that does not change it."""
        try:
            self.policy.together(method, *arguments, doing=doing)
        except DeviceOutOfMemory:
            if not self.policy.usable:
                self.policy_at = None
            raise
