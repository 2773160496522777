"""RLJob's operator against KubeRay's, one after the other on the same control plane: seconds, writes, memory, CPU.

    git clone https://github.com/ray-project/kuberay && git -C kuberay checkout v1.7.0
    python -m bench.programs.operator_duel --kuberay kuberay [--jobs 1000] [--nodes 50]

Each RLJob and each RayCluster has two pods, one of them the head or the controller, that request the same. KWOK starts
the pods. KubeRay's manager is built from its repository and runs with its defaults, without leader election.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.harness.operator_cluster import (
    control_plane,
    counted,
    kubectl,
    kwok,
    make_nodes,
    start_all,
)
from bench.harness.record import record
from bench.harness.samplers import MemoryWatch
from bench.programs.operator_scale import measure as measure_rljob
from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator.api_client import Object, ResourceClient

BASE_PORT = 24300
METRICS_PORT, PROBES_PORT = BASE_PORT + 90, BASE_PORT + 91
_WRITES = ("POST", "PUT", "PATCH", "DELETE")
_COMPARED = (
    "jobs",
    "submitted_seconds",
    "last_pod_created_seconds",
    "median_running_seconds",
    "all_running_seconds",
    "writes_per_job_until_running",
    "operator_cpu_seconds_until_running",
    "peak_bytes",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kuberay", type=Path, required=True, help="checkout of KubeRay's repository")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=50)
    arguments = parser.parse_args()
    repository = arguments.kuberay.resolve()
    kuberay = measure_kuberay(build_manager(repository), repository, arguments.jobs, arguments.nodes)
    rljob = measure_rljob(arguments.jobs, arguments.nodes)
    rows = [
        {"operator": f"KubeRay {version_of(repository)}", **kuberay},
        {"operator": "RLJob", **{name: rljob[name] for name in _COMPARED}},
    ]
    name = "operator_duel" if arguments.jobs == 1000 else f"operator_duel_{arguments.jobs}"
    print(record(name, rows, f"{arguments.jobs} jobs of two pods at once on {arguments.nodes} KWOK nodes"))


def build_manager(repository: Path) -> Path:
    """Build KubeRay's manager, outside its repository."""
    program = repository.parent / "kuberay-manager"
    subprocess.run(["go", "build", "-o", program, "."], cwd=repository / "ray-operator", check=True)
    return program


def version_of(repository: Path) -> str:
    command = ["git", "describe", "--tags", "--always"]
    return subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout.strip()


def measure_kuberay(manager: Path, repository: Path, jobs: int, nodes: int) -> dict[str, Any]:
    with control_plane(BASE_PORT, scheduler=True) as plane, kwok(plane):
        kubectl(plane, "create", "-f", str(repository / "ray-operator" / "config" / "crd" / "bases"))
        plane.wait_established()
        api = ResourceClient.from_kubeconfig(plane.kubeconfig)
        make_nodes(api, nodes)
        with running(manager, plane) as process, MemoryWatch({"operator": process}) as memory:
            clusters = (ray_cluster(f"cluster-{number}") for number in range(jobs))
            row = start_all(api, "rayclusters", clusters, "RayClusterProvisioned")
            until_running = counted(METRICS_PORT, "rest_client_requests_total", "method")
            times = process.cpu_times()
    return row | {
        "writes_per_job_until_running": sum(until_running[method,] for method in _WRITES) / jobs,
        "operator_cpu_seconds_until_running": times.user + times.system,
        "peak_bytes": memory.peak_bytes,
    }


@contextmanager
def running(manager: Path, plane: ControlPlane) -> Iterator[psutil.Process]:
    """The manager, ready to reconcile."""
    command = [
        str(manager),
        "--enable-leader-election=false",
        f"--metrics-addr=:{METRICS_PORT}",
        f"--health-probe-bind-address=:{PROBES_PORT}",
        f"--kubeconfig={plane.kubeconfig}",
    ]
    with (plane.directory / "kuberay.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_ready(process)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def wait_ready(process: subprocess.Popen[bytes]) -> None:
    """Return when the manager is ready and had time to fill its caches."""
    while True:
        assert process.poll() is None, f"KubeRay's manager exited with {process.returncode}"
        try:
            if httpx.get(f"http://127.0.0.1:{PROBES_PORT}/readyz").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    time.sleep(5.0)


def ray_cluster(name: str) -> Object:
    """One head and one worker, which request what the pods of `small_job` request."""
    worker = {"groupName": "workers", "replicas": 1, "minReplicas": 1, "maxReplicas": 1, "rayStartParams": {}}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name},
        "spec": {
            "rayVersion": "2.52.0",
            "headGroupSpec": {"rayStartParams": {}, "template": template("ray-head", "500m", "2Gi")},
            "workerGroupSpecs": [{**worker, "template": template("ray-worker", "1", "4Gi")}],
        },
    }


def template(container: str, cpu: str, memory: str) -> Object:
    resources = {"requests": {"cpu": cpu, "memory": memory}}
    image = "registry.example/ray:2.52.0"
    return {"spec": {"containers": [{"name": container, "image": image, "resources": resources}]}}


if __name__ == "__main__":
    main()
