"""The processes of one role, which are started, called and stopped together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.plan_change import Role
from rljob_trainer.errors import WorkerLost
from rljob_trainer.hardware import Bundle
from rljob_trainer.roles.actor import RoleHandle, spawn
from rljob_trainer.roles.calls import Calls, wait_for
from rljob_trainer.roles.faults import InjectedFault
from rljob_trainer.roles.warm.setup_worker import ROLE_VARIABLE

_PLACEMENT_SECONDS = 60
"""The resources exist when they are requested, unless a worker has just died."""


@dataclass(frozen=True, slots=True)
class RoleResources:
    """Ray resources of the processes of a role."""

    group: Any
    """Ray placement group; None: the processes may run anywhere."""

    gpus: float
    """GPUs of each process; 0 on a CPU."""

    first_bundle: int = 0
    """Index of the group's bundle in which rank 0 runs. The other ranks follow, one in each bundle."""


class RoleProcesses:
    """The ranks of a role, each an actor: `policy-0`, `policy-1`. There are none before `start` and after `end`."""

    def __init__(
        self, role: Role, class_name: str, ranks: int, resources: RoleResources, logs: Path, unit_size: int = 1
    ) -> None:
        """`class_name`: class of the object in each process, as `module:Class`. `unit_size`: number of successive
        processes that work as one, such as those of an engine. None of them is of use without the others."""
        self.role = role
        self._class_name = class_name
        self._ranks = ranks
        self._resources = resources
        self._logs = logs
        self._unit_size = unit_size
        self._handles: dict[str, RoleHandle] = {}
        self.absent: set[str] = set()
        """First processes of units that are left out for now (`AbsentEngines`)."""
        self.loading: Calls = {}
        """Calls that load the role; they have completed if `loaded`."""
        self.loaded = False

    def __len__(self) -> int:
        return self._ranks

    @property
    def started(self) -> bool:
        return bool(self._handles)

    @property
    def handles(self) -> Mapping[str, RoleHandle]:
        """By actor name."""
        return self._handles

    @property
    def units(self) -> list[tuple[str, ...]]:
        """Names of the processes that work as one."""
        names, size = tuple(self._handles), self._unit_size
        return [names[first : first + size] for first in range(0, len(names), size)]

    @property
    def working(self) -> list[tuple[str, ...]]:
        """The units that are in use."""
        return [unit for unit in self.units if unit[0] not in self.absent]

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the processes without waiting. A call waits until its process is up."""
        self._handles = {f"{self.role}-{rank}": self._spawned(rank, environment) for rank in range(self._ranks)}

    def replace(self, lost: str, environment: Mapping[str, str], *arguments: Any) -> tuple[str, ...]:
        """Start new processes in place of a lost one and of the others of its unit, which are killed, and construct
        their objects. Returns the names of the new processes without waiting.
        """
        import ray

        unit = next(unit for unit in self.units if lost in unit)
        for name in unit:
            ray.kill(self._handles[name].actor, no_restart=True)
        for rank, name in enumerate(self._handles):
            if name in unit:
                self._handles[name] = self._spawned(rank, environment)
                self._handles[name].actor.construct.remote(rank, *arguments)
        return unit

    def _spawned(self, rank: int, environment: Mapping[str, str]) -> RoleHandle:
        name = f"{self.role}-{rank}"
        options = _options(rank, self._resources, {**environment, ROLE_VARIABLE: self.role})
        return spawn(name, self._class_name, self._logs / f"{name}.log", options)

    def construct(self, *arguments: Any) -> Calls:
        """Construct the object in each process, from its rank and `arguments`. The results are process ids."""
        return {
            name: handle.actor.construct.remote(rank, *arguments)
            for rank, (name, handle) in enumerate(self._handles.items())
        }

    def call(self, method: str, *arguments: Any) -> Calls:
        return {name: getattr(handle, method).remote(*arguments) for name, handle in self._handles.items()}

    def call_first(self, method: str, *arguments: Any) -> Calls:
        name, handle = next(iter(self._handles.items()))
        return {name: getattr(handle, method).remote(*arguments)}

    def inject(self, rank: int, fault: InjectedFault) -> None:
        """Inject `fault` into the process of `rank`."""
        name = f"{self.role}-{rank}"
        wait_for({name: self._handles[name].actor.inject.remote(fault)}, "injecting a fault")

    def end(self) -> None:
        """Kill the processes, which frees their memory."""
        import ray

        for handle in self._handles.values():
            ray.kill(handle.actor, no_restart=True)
        self._handles, self.loading, self.loaded = {}, {}, False


def placement_group(bundles: Sequence[Bundle] | None) -> Any:
    """A placement group for `bundles`, held until Ray ends; None if the roles may run anywhere."""
    if bundles is None:
        return None
    from ray.util.placement_group import placement_group

    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    if not group.wait(timeout_seconds=_PLACEMENT_SECONDS):
        raise WorkerLost(
            f"expected resources in {len(bundles)} places within {_PLACEMENT_SECONDS} s, Ray found none: a worker died"
        )
    return group


def _options(rank: int, resources: RoleResources, environment: Mapping[str, str]) -> dict[str, Any]:
    runtime_env = {"env_vars": dict(environment)}
    if resources.group is None:
        return {"num_cpus": 1, "runtime_env": runtime_env}
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    gpus = {"num_gpus": resources.gpus} if resources.gpus else {}
    strategy = PlacementGroupSchedulingStrategy(
        resources.group, placement_group_bundle_index=resources.first_bundle + rank
    )
    return {"num_cpus": 1, **gpus, "runtime_env": runtime_env, "scheduling_strategy": strategy}
