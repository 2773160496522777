"""Engines whose pod is lost while the others continue: they start in the replacement pod, and work from the next sync
on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rljob_trainer.errors import WorkerLost
from rljob_trainer.hardware import Bundle
from rljob_trainer.roles.calls import Calls, wait_for
from rljob_trainer.roles.role_processes import RoleProcesses

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


class AbsentEngines:
    """The engines that are excluded from generation and weight syncs because their pods are lost. Ray reports a lost
    process before it knows that the node is lost, and would place a new process there. A new process is therefore
    started only once the node of the replacement pod answers.
    """

    def __init__(
        self, engines: RoleProcesses, bundles: Sequence[Bundle] | None, start: Callable[[Engine], Calls]
    ) -> None:
        """`bundles`: Ray resources of each process. `start`: replaces the processes of an engine, and starts it."""
        self._engines = engines
        self._bundles = bundles
        self._start = start
        self._absences: dict[Engine, _Absence] = {}

    def is_lost_with_its_place(self, engine: Engine) -> bool:
        return not self._has_place(engine)

    def add(self, engine: Engine) -> None:
        self._absences[engine] = _Absence(time.monotonic())
        self._engines.absent.add(engine[0])

    def forget(self) -> None:
        """All engines end, and are started together."""
        self._absences.clear()
        self._engines.absent.clear()

    def start_returned(self) -> None:
        """Start engines whose pods are back."""
        for engine, absence in self._absences.items():
            if not absence.starting and self._has_place(engine):
                absence.starting = self._start(engine)

    def take_in(self, may_replace: Callable[[WorkerLost], bool] = lambda _failure: False) -> None:
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
                self._engines.absent.discard(engine[0])
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
            if self._has_place(engine) and not may_replace(failure):
                raise
            absence.starting = {}

    def _has_place(self, engine: Engine) -> bool:
        if self._bundles is None:
            return True
        ranks = [rank for rank, name in enumerate(self._engines.handles) if name in engine]
        return all(has_place(self._bundles[rank]) for rank in ranks)


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
