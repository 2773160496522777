"""How each kind of fault is done, to whatever is there at that time."""

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
from rljob_testing.soak.schedule import FaultKind, PlannedFault, drawn

_OTHER_PROGRAMS = ("coredns", "kube-controller-manager", "kube-proxy", "kube-scheduler", "volume-provisioner")


@dataclass(frozen=True, slots=True)
class Fault:
    """One that was done. `at`: seconds since the epoch. `jobs`: those that it may have disturbed."""

    kind: FaultKind
    at: float
    target: str
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Target:
    """`job`: the one that it belongs to; None where it serves all. `strike` is given the seconds to stay away."""

    name: str
    job: str | None
    strike: Callable[[float], None]


def strike(planned: PlannedFault, cluster: SoakCluster) -> Fault | None:
    """Do the fault, and return when it is done; None where nothing is there that it could be done to."""
    target = drawn(_TARGETS[planned.kind](cluster), planned.draw)
    if target is None:
        return None
    unfinished = (job["metadata"]["name"] for job in cluster.jobs() if not finished(job))
    jobs = (target.job,) if target.job else tuple(unfinished)
    fault = Fault(planned.kind, time.time(), target.name, jobs)
    target.strike(planned.away_seconds)
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
    """Those that run, by name."""
    return sorted((pod for pod in pods if pod["status"].get("phase") == "Running"), key=_name)


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _job_of(pod: Object) -> str:
    return str(pod["metadata"]["labels"][JOB_NAME])
