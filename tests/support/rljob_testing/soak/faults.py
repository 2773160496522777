"""Injects each kind of fault into a target that exists at that time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rljob_operator.labels import JOB_NAME
from rljob_testing.cluster.job_status import finished
from rljob_testing.soak import processes
from rljob_testing.soak.cluster import Object, SoakCluster
from rljob_testing.soak.processes import RunningProcess
from rljob_testing.soak.schedule import FaultKind, PlannedFault, choose

_OTHER_PROGRAMS = ("coredns", "kube-controller-manager", "kube-proxy", "kube-scheduler", "volume-provisioner")


@dataclass(frozen=True, slots=True)
class Fault:
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


def inject(planned: PlannedFault, cluster: SoakCluster) -> Fault | None:
    """Inject the fault, and return when it is done; None if it has no target."""
    target = choose(_TARGETS[planned.kind](cluster), planned.draw)
    if target is None:
        return None
    unfinished = (job["metadata"]["name"] for job in cluster.jobs() if not finished(job))
    jobs = (target.job,) if target.job else tuple(unfinished)
    fault = Fault(planned.kind, time.time(), target.name, jobs)
    target.inject(planned.away_seconds)
    return fault


# --- what there is ---


def _processes_in_jobs(cluster: SoakCluster) -> list[_Target]:
    return [
        _Target(f"{found.name} in {_name(pod)}", _job_of(pod), partial(_kill, found))
        for pod in _running(cluster.pods())
        for found in processes.processes_of_pod(pod["metadata"]["uid"])
    ]


def _pods_of_jobs(cluster: SoakCluster, *options: str) -> list[_Target]:
    return [
        _Target(_name(pod), _job_of(pod), partial(_delete, cluster, pod, options)) for pod in _running(cluster.pods())
    ]


def _operators_processes(cluster: SoakCluster) -> list[_Target]:
    return [
        _Target(f"{found.name} in {_name(pod)}", None, partial(_kill, found))
        for pod in _running(cluster.operator_pods())
        for found in processes.processes_of_pod(pod["metadata"]["uid"])
        if found.name != "pause"
    ]


def _operators_pods(cluster: SoakCluster) -> list[_Target]:
    return [_Target(_name(pod), None, partial(_delete, cluster, pod, ())) for pod in _running(cluster.operator_pods())]


def _shims(cluster: SoakCluster) -> list[_Target]:
    return [_Target(f"shim of {shim.name[:12]}", None, partial(_kill, shim)) for shim in processes.shims()]


def _programs(*names: str) -> Callable[[SoakCluster], list[_Target]]:
    def targets(cluster: SoakCluster) -> list[_Target]:
        found = [program for name in names for program in processes.program(name)]
        return [_Target(program.name, None, partial(_kill, program)) for program in found]

    return targets


def _api_server_to_stop(cluster: SoakCluster) -> list[_Target]:
    return [_Target(found.name, None, partial(_stop, found)) for found in processes.program("kube-apiserver")]


_TARGETS: dict[FaultKind, Callable[[SoakCluster], list[_Target]]] = {
    "KillProcess": _processes_in_jobs,
    "DeletePod": _pods_of_jobs,
    "DeletePodAtOnce": lambda cluster: _pods_of_jobs(cluster, "--grace-period=0", "--force"),
    "KillShim": _shims,
    "KillContainerd": _programs("containerd "),
    "KillKubelet": _programs("kubelet"),
    "KillOperator": _operators_processes,
    "DeleteOperator": _operators_pods,
    "KillApiServer": _programs("kube-apiserver"),
    "StopApiServer": _api_server_to_stop,
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


def _job_of(pod: Object) -> str:
    return str(pod["metadata"]["labels"][JOB_NAME])
