"""The external faults of a soak: their kinds and times, which the seed determines, and their injection."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from rljob_operator.labels import JOB_NAME
from rljob_testing.cluster import finished
from rljob_testing.soak import processes
from rljob_testing.soak.cluster import Object, SoakCluster
from rljob_testing.soak.processes import RunningProcess

Target = TypeVar("Target")

FaultKind = Literal[
    "KillProcess",
    "DeletePod",
    "DeletePodAtOnce",
    "KillShim",
    "KillContainerd",
    "KillKubelet",
    "KillOperator",
    "DeleteOperator",
    "KillApiServer",
    "StopApiServer",
    "KillEtcd",
    "KillProgram",
]
"""KillProcess: any process in a pod of a job, including its sandbox. DeletePodAtOnce: without a grace period.
StopApiServer: the API server is suspended for a while. KillProgram: another program of the control plane. Kills use
SIGKILL."""

_DECK: tuple[FaultKind, ...] = (
    *("KillProcess",) * 5,
    *("DeletePod",) * 2,
    *("DeletePodAtOnce",) * 2,
    "KillShim",
    "KillContainerd",
    *("KillKubelet",) * 2,
    *("KillOperator",) * 2,
    "DeleteOperator",
    "KillApiServer",
    *("StopApiServer",) * 2,
    "KillEtcd",
    "KillProgram",
)
_GAP_SECONDS = (20.0, 50.0)
_AWAY_SECONDS = (5.0, 40.0)


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault with its time."""

    at_seconds: float
    """Seconds after the start of the soak."""
    kind: FaultKind
    draw: float
    """In [0, 1); selects one of the targets that exist at that time."""
    away_seconds: float
    """Time that a suspended target stays suspended."""


def planned_faults(seed: int, seconds: float) -> list[PlannedFault]:
    """All faults of a soak of `seconds`. Kinds are dealt from a shuffled deck, so each kind has its turn."""
    chance = random.Random(seed)
    planned: list[PlannedFault] = []
    deck: list[FaultKind] = []
    at_seconds = chance.uniform(*_GAP_SECONDS)
    while at_seconds < seconds:
        if not deck:
            deck = chance.sample(_DECK, len(_DECK))
        planned.append(PlannedFault(at_seconds, deck.pop(), chance.random(), chance.uniform(*_AWAY_SECONDS)))
        at_seconds += chance.uniform(*_GAP_SECONDS)
    return planned


def choose(targets: Sequence[Target], draw: float) -> Target | None:
    """The target that `draw` selects; None if there is none."""
    return targets[int(draw * len(targets))] if targets else None


_OTHER_PROGRAMS = ("coredns", "kube-controller-manager", "kube-proxy", "kube-scheduler", "volume-provisioner")


@dataclass(frozen=True, slots=True)
class InjectedSoakFault:
    """A fault that was injected."""

    kind: FaultKind
    at: float
    """Seconds since the epoch."""
    target: str
    jobs: tuple[str, ...]
    """Jobs that the fault may have disturbed."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A process or object that a fault can be injected into."""

    name: str
    job: str | None
    """The job that the target belongs to; None if all jobs share it."""
    inject: Callable[[float], None]
    """Called with the seconds that the target stays away."""


def inject(planned: PlannedFault, cluster: SoakCluster) -> InjectedSoakFault | None:
    """Inject the fault, and return when it is done; None if it has no target."""
    target = choose(_TARGETS[planned.kind](cluster), planned.draw)
    if target is None:
        return None
    unfinished = (job["metadata"]["name"] for job in cluster.jobs() if not finished(job))
    jobs = (target.job,) if target.job else tuple(unfinished)
    fault = InjectedSoakFault(planned.kind, time.time(), target.name, jobs)
    target.inject(planned.away_seconds)
    return fault


# --- what there is ---


def _processes(pods: list[Object]) -> list[_Target]:
    return [
        _Target(f"{found.name} in {_name(pod)}", _job_of(pod), partial(_kill, found))
        for pod in _running(pods)
        for found in processes.processes_of_pod(pod["metadata"]["uid"])
    ]


def _pods(cluster: SoakCluster, pods: list[Object], *options: str) -> list[_Target]:
    return [_Target(_name(pod), _job_of(pod), partial(_delete, cluster, pod, options)) for pod in _running(pods)]


def _programs(*names: str) -> Callable[[SoakCluster], list[_Target]]:
    def targets(cluster: SoakCluster) -> list[_Target]:
        found = [program for name in names for program in processes.program(name)]
        return [_Target(program.name, None, partial(_kill, program)) for program in found]

    return targets


_TARGETS: dict[FaultKind, Callable[[SoakCluster], list[_Target]]] = {
    "KillProcess": lambda cluster: _processes(cluster.pods()),
    "DeletePod": lambda cluster: _pods(cluster, cluster.pods()),
    "DeletePodAtOnce": lambda cluster: _pods(cluster, cluster.pods(), "--grace-period=0", "--force"),
    "KillShim": lambda _: [
        _Target(f"shim of {shim.name[:12]}", None, partial(_kill, shim)) for shim in processes.shims()
    ],
    "KillContainerd": _programs("containerd "),
    "KillKubelet": _programs("kubelet"),
    "KillOperator": lambda cluster: [
        target for target in _processes(cluster.operator_pods()) if not target.name.startswith("pause ")
    ],
    "DeleteOperator": lambda cluster: _pods(cluster, cluster.operator_pods()),
    "KillApiServer": _programs("kube-apiserver"),
    "StopApiServer": lambda _: [
        _Target(found.name, None, partial(_stop, found)) for found in processes.program("kube-apiserver")
    ],
    "KillEtcd": _programs("etcd"),
    "KillProgram": _programs(*_OTHER_PROGRAMS),
}


# --- what is done to it ---


def _kill(found: RunningProcess, _: float) -> None:
    found.kill()


def _stop(found: RunningProcess, away_seconds: float) -> None:
    found.process.suspend()
    try:
        time.sleep(away_seconds)
    finally:
        found.process.resume()


def _delete(cluster: SoakCluster, pod: Object, options: tuple[str, ...], _: float) -> None:
    cluster.delete("pod", _name(pod), *options, namespace=pod["metadata"]["namespace"])


def _running(pods: list[Object]) -> list[Object]:
    """The running pods, by name."""
    return sorted((pod for pod in pods if pod["status"].get("phase") == "Running"), key=_name)


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _job_of(pod: Object) -> str | None:
    """None for a pod of the operator."""
    job: str | None = pod["metadata"].get("labels", {}).get(JOB_NAME)
    return job
