"""The processes of the rollout engines. If the pod of an engine is lost while others continue, the engine starts in the
replacement pod, and works from the next sync on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rljob_trainer.errors import WorkerLost
from rljob_trainer.roles.calls import Calls, wait_for
from rljob_trainer.roles.role_processes import RoleProcesses, RoleResources

REJOIN_SECONDS = 1800.0
"""Time for a lost pod to come back, as workers have to join at the start of an attempt (`RLJOB_JOIN_TIMEOUT`)."""

_ANSWER_SECONDS = 3.0
_EVERYWHERE = ("CPU", "GPU")
"""Resources that any machine may have. A pod has another one, by which its processes are placed."""

Engine = tuple[str, ...]
"""Names of the processes of an engine."""


@dataclass(slots=True)
class _Absence:
    since: float
    """Time at which the engine was lost, on a monotonic clock, in seconds."""
    starting: Calls = field(default_factory=dict)
    """Calls that start the engine; empty until its pod is back."""


class EngineProcesses(RoleProcesses):
    """The engines, each of one or several successive processes. None of these is of use without the others.

    An engine whose pod is lost is absent: it is left out of generation and weight syncs. Ray reports a lost process
    before it knows that the node is lost, and would place a new process there. A new process is therefore started only
    once the node of the replacement pod answers.
    """

    role = "rollout"

    def __init__(self, class_name: str, ranks: int, resources: RoleResources, logs: Path, engine_size: int) -> None:
        """`ranks`: processes of all engines. `engine_size`: those of one."""
        super().__init__(class_name, ranks, resources, logs)
        self._engine_size = engine_size
        self._absences: dict[Engine, _Absence] = {}

    def end(self) -> None:
        super().end()
        self._absences.clear()

    @property
    def engines(self) -> list[Engine]:
        names, size = tuple(self.handles), self._engine_size
        return [names[first : first + size] for first in range(0, len(names), size)]

    @property
    def working(self) -> list[Engine]:
        """The engines that are not absent."""
        return [engine for engine in self.engines if engine not in self._absences]

    def engine_of(self, process: str | None) -> Engine:
        """The engine of a process; empty if it is of none."""
        return next((engine for engine in self.engines if process in engine), ())

    def load(self, engine: Engine) -> Calls:
        """Calls that start an engine in its processes. They meet at a port of the first, which Ray passes to them."""
        port = [self.handles[engine[0]].serve_store.remote()] if len(engine) > 1 else []
        return {name: self.handles[name].start.remote(*port) for name in engine}

    def restart(self, engine: Engine) -> Calls:
        """Start an engine in new processes. Returns the calls that do, without waiting."""
        import ray

        for name in engine:
            ray.kill(self.handles[name].actor, no_restart=True)
        for rank in self._ranks_of(engine):
            self._start(rank)
        return self.load(engine)

    def has_lost_pod(self, engine: Engine) -> bool:
        """True if the pod of a process of the engine is not there."""
        return not all(has_place(self._resources.bundle(rank)) for rank in self._ranks_of(engine))

    def leave_out(self, engine: Engine) -> None:
        """Let the engine be absent until its pod is back."""
        self._absences[engine] = _Absence(time.monotonic())

    def start_returned(self) -> None:
        """Start engines whose pods are back."""
        for engine, absence in self._absences.items():
            if not absence.starting and not self.has_lost_pod(engine):
                absence.starting = self.restart(engine)

    def include_started(self, may_replace: Callable[[WorkerLost], bool]) -> None:
        """Include engines that have started. They have no weights yet.

        `may_replace`: called when a process was lost while its engine started, although its pod is there; if it returns
        True, the engine starts again.
        Raises the failure of an engine that did not start, and `WorkerLost` if a pod has not come back in time.
        """
        for engine, absence in self._absences.items():
            self._check(engine, absence, may_replace)
        self.start_returned()
        for engine, absence in list(self._absences.items()):
            if absence.starting and len(_ended(absence.starting)) == len(absence.starting):
                del self._absences[engine]
            elif not absence.starting and time.monotonic() - absence.since > REJOIN_SECONDS:
                raise WorkerLost(
                    f"expected a new pod for {', '.join(engine)} within {REJOIN_SECONDS:.0f} s, none joined; check it "
                    "with `kubectl describe pod` and `kubectl logs`"
                ).of(engine[0])

    def _check(self, engine: Engine, absence: _Absence, may_replace: Callable[[WorkerLost], bool]) -> None:
        """Raise the failure of a call, unless the pod was lost again, or the lost process may be replaced."""
        try:
            wait_for(_ended(absence.starting), "starting in a new pod")
        except WorkerLost as failure:
            if not self.has_lost_pod(engine) and not may_replace(failure):
                raise
            absence.starting = {}

    def _ranks_of(self, engine: Engine) -> list[int]:
        return [rank for rank, name in enumerate(self.handles) if name in engine]


def _ended(calls: Calls) -> Calls:
    if not calls:
        return {}
    import ray

    ended, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=0)
    return {name: call for name, call in calls.items() if call in ended}


def has_place(bundle: Iterable[str]) -> bool:
    """True if the place that `bundle` names is there: a node of Ray answers, and no node that is lost still claims it.

    Always true for a bundle that names no place.
    """
    import ray

    own = [resource for resource in bundle if resource not in _EVERYWHERE]
    if not own:
        return True
    nodes = [node for node in ray.nodes() if node["Alive"] and all(name in node["Resources"] for name in own)]
    return bool(nodes) and all(_answers(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
    except OSError:
        return False
    return True
