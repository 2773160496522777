"""The settings of the roles, the processes of one role, and the group of the policy ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rljob_api.plan_change import Role
from rljob_api.topology import Topology
from rljob_client.errors import RunError
from rljob_trainer.errors import DeviceOutOfMemory, WorkerLost
from rljob_trainer.hardware import Bundle
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.roles.actor import RoleHandle, spawn
from rljob_trainer.roles.calls import Calls, all_returned, wait_for
from rljob_trainer.roles.faults import InjectedFault
from rljob_trainer.roles.time_limit import time_limit
from rljob_trainer.roles.warm.setup_worker import ROLE_VARIABLE
from rljob_trainer.rollout.config import RolloutConfig


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Settings of the role processes."""

    topology: Topology

    ranks: int
    """Policy ranks."""

    engine_processes: int
    """Processes of all rollout engines. Colocated: as many as ranks, one on each GPU."""

    policy: PolicyConfig

    rollout: RolloutConfig

    policy_environment: dict[str, str]
    """Environment variables of the policy processes."""

    rollout_environment: dict[str, str]
    """Environment variables of the engine processes."""

    output_dir: Path

    bundles: tuple[Bundle, ...]
    """The Ray resources of each place: first those of the ranks and their colocated engines, then of other engines."""

    @property
    def first_engine_bundle(self) -> int:
        """Index of the bundle of engine 0. Colocated engines are in the bundles of the ranks."""
        return 0 if self.topology == "Colocated" else self.ranks

    @property
    def gpus_per_process(self) -> float:
        """GPUs that each process requests from Ray: 0.5 if a policy rank and an engine share one."""
        if self.policy.device == "cpu":
            return 0.0
        return 0.5 if self.topology == "Colocated" else 1.0


_PLACEMENT_SECONDS = 60
"""The resources exist when they are requested, unless a worker has just died."""


@dataclass(frozen=True, slots=True)
class RoleResources:
    """Ray resources of the processes of a role."""

    group: Any
    """Ray placement group, of `bundles`."""

    bundles: Sequence[Bundle]

    gpus: float
    """GPUs of each process; 0 on a CPU."""

    first_bundle: int = 0
    """Index of the bundle in which rank 0 runs. The other ranks follow, one in each bundle."""

    def bundle(self, rank: int) -> Bundle:
        """The bundle in which `rank` runs."""
        return self.bundles[self.first_bundle + rank]

    def options(self, rank: int) -> dict[str, Any]:
        """Options of Ray for the actor of `rank`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index = self.first_bundle + rank
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        return {"num_cpus": 1, "num_gpus": self.gpus, "scheduling_strategy": strategy}


class RoleProcesses:
    """The ranks of a role, each an actor: `policy-0`, `policy-1`. There are none before `start` and after `end`."""

    role: ClassVar[Role]

    def __init__(self, class_name: str, ranks: int, resources: RoleResources, logs: Path) -> None:
        """`class_name`: class of the object in each process, as `module:Class`."""
        self._class_name = class_name
        self._ranks = ranks
        self._resources = resources
        self._logs = logs
        self.handles: dict[str, RoleHandle] = {}
        """Handle by actor name."""
        self.loading: Calls = {}
        """Calls that load the role; they have completed if `loaded`."""
        self.loaded = False

    def __len__(self) -> int:
        return self._ranks

    @property
    def started(self) -> bool:
        return bool(self.handles)

    def configure(self, environment: Mapping[str, str], *arguments: Any) -> None:
        """Set the variables of the processes that start from now on, and the arguments of their objects after the
        rank."""
        self._environment, self._arguments = {**environment, ROLE_VARIABLE: self.role}, arguments

    def start(self) -> Calls:
        """Start the processes. Returns the calls that construct their objects, whose results are process ids."""
        return {name: call for rank in range(self._ranks) for name, call in self._start(rank).items()}

    def _start(self, rank: int) -> Calls:
        name, runtime_env = f"{self.role}-{rank}", {"env_vars": self._environment}
        options = {**self._resources.options(rank), "runtime_env": runtime_env}
        self.handles[name] = spawn(name, self._class_name, self._logs / f"{name}.log", options)
        return {name: self.handles[name].actor.construct.remote(rank, *self._arguments)}

    def call(self, method: str, *arguments: Any) -> Calls:
        """Calls of `method` in all processes, without waiting."""
        return {name: getattr(handle, method).remote(*arguments) for name, handle in self.handles.items()}

    def results(self, method: str, *arguments: Any, doing: str) -> dict[str, Any]:
        """The results of a call of `method` in each process, by actor name. Raises the first failure."""
        return wait_for(self.call(method, *arguments), doing)

    def inject(self, rank: int, fault: InjectedFault) -> None:
        """Inject `fault` into the process of `rank`."""
        name = f"{self.role}-{rank}"
        wait_for({name: self.handles[name].actor.inject.remote(fault)}, "injecting a fault")

    def end(self) -> None:
        """Kill the processes, which frees their memory."""
        import ray

        for handle in self.handles.values():
            ray.kill(handle.actor, no_restart=True)
        self.handles, self.loading, self.loaded = {}, {}, False


def placement_group(bundles: Sequence[Bundle]) -> Any:
    """A placement group for `bundles`, held until Ray ends. Raises `WorkerLost` if Ray has no such resources."""
    from ray.util.placement_group import placement_group

    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    if not group.wait(timeout_seconds=_PLACEMENT_SECONDS):
        raise WorkerLost(
            f"expected resources in {len(bundles)} places within {_PLACEMENT_SECONDS} s, Ray found none: a worker died"
        )
    return group


def remove_placement_group(group: Any) -> None:
    """Free the resources of a placement group."""
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


_LEAVE_SECONDS = 30.0
"""Time for all ranks to leave a call after one has left the group. They leave at their next collective operation."""
_REJOIN_SECONDS = 120.0


class PolicyProcesses(RoleProcesses):
    """The policy ranks. If one fails in a call in which they wait for one another, all leave it, and can form their
    group anew."""

    role = "policy"
    scattered = False
    """The ranks have left their group, and `rejoin` brings them together. Their processes are well."""
    _in_update = False

    def end(self) -> None:
        super().end()
        self.scattered = False

    def connect(self) -> None:
        """Form the first group of new processes."""
        self.results("connect", *self._rendezvous(), doing="joining the process group")

    def together(self, method: str, *arguments: Any, doing: str) -> dict[str, Any]:
        """Call a method of all ranks, which may wait for one another in it. The results by actor name.

        If one runs out of memory, the others leave the call before the failure is raised. If they do not in time, or
        after any other failure, the processes are unusable and `scattered` is False.
        """
        return self.joined(self.call(method, *arguments), doing=doing, in_update=method == "update")

    def joined(self, calls: Calls, *, doing: str, in_update: bool) -> dict[str, Any]:
        """The results of `calls` to all ranks, as of `together`."""
        try:
            return wait_for(calls, doing)
        except DeviceOutOfMemory:
            self.scattered = len(self) > 1 and all_returned(calls, within_seconds=_LEAVE_SECONDS)
            self._in_update = in_update
            raise

    @property
    def usable(self) -> bool:
        """True if no rank still waits for another after a failed call."""
        return self.scattered or len(self) == 1

    def can_undo_update(self) -> bool:
        """True if all ranks can repeat the failed update with the same result."""
        if not self.usable:
            return False
        try:
            return all(self.results("can_undo_update", doing="checking the failed update").values())
        except RunError:
            return False

    def rejoin(self) -> None:
        """Bring the ranks to the state before the failed call, in a new group. Raises `RunError` if that fails."""
        with time_limit(_REJOIN_SECONDS):
            self.results("rejoin", *self._rendezvous(), self._in_update, doing="joining the new process group")
        self.scattered = False

    def _rendezvous(self) -> tuple[str, int]:
        """Host and port at which the ranks meet."""
        name, first = next(iter(self.handles.items()))
        host, port = wait_for({name: first.rendezvous.remote()}, "starting")[name]
        return host, port
