"""A control plane and an operator for benchmarks."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import Object, ResourceClient
from rljob_testing.operator.installation import install, module_files
from rljob_testing.operator.operator_process import OperatorProcess, write_kubeconfig
from rljob_testing.repository import ROOT

NAMESPACE = "bench"
JOBS_PER_NAMESPACE = 1000
"""Kubernetes is tested with up to 3,000 pods in a namespace."""
OPERATOR_NAMESPACE = "rljob-system"
CLIENTS = 8
KWOK_MODULE = "sigs.k8s.io/kwok@v0.8.0"
_LOOK_SECONDS = 5.0
"""Time between polls, of a thousand objects. Each poll lists all objects; it is rare so that it does not affect the
measurement."""
_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok")
_QUESTIONS = ("leases", "tokenreviews", "subjectaccessreviews")


@contextmanager
def control_plane(base_port: int, *, scheduler: bool) -> Iterator[ControlPlane]:
    """A control plane with the project's CRDs and the namespace `bench`, removed afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="rljob-bench-") as directory,
        ControlPlane(Path(directory), base_port=base_port, controller_manager=True, scheduler=scheduler) as plane,
    ):
        kubectl(plane, "apply", "-f", str(ROOT / "crds" / "manifests"))
        plane.wait_established()
        kubectl(plane, "create", "namespace", NAMESPACE)
        yield plane


def kubectl(plane: ControlPlane, *arguments: str) -> None:
    subprocess.run([plane.kubectl, "--kubeconfig", plane.kubeconfig, *arguments], check=True, stdout=subprocess.DEVNULL)


def installed_operator(plane: ControlPlane, base_port: int) -> OperatorProcess:
    """An operator with the permissions of the chart and the settings of an installation, not started."""
    token = install(
        ResourceClient.from_kubeconfig(plane.kubeconfig), plane.kubectl.with_name("helm"), OPERATOR_NAMESPACE
    )
    kubeconfig = write_kubeconfig(plane.directory / "operator.kubeconfig", plane.url, token, plane.ca)
    settings = {
        "trainer_image": "localhost/rljob/trainer",
        "trainer_torch_version": "2.13.0",
        "lease_namespace": OPERATOR_NAMESPACE,
        "shared_account": True,
        "metrics_auth": False,
        "metrics_tls": False,
    }
    return OperatorProcess(kubeconfig, plane.directory / "operator.log", base_port, base_port + 1, settings)


def counted(port: int, metric: str, *labels: str) -> Counter[tuple[str, ...]]:
    """The values of a counter by these labels, from the metrics at `port`."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").raise_for_status().text
    found: Counter[tuple[str, ...]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == metric:
                found[tuple(sample.labels[label] for label in labels)] += int(sample.value)
    return found


def operator_requests(operator: OperatorProcess) -> Counter[tuple[str, ...]]:
    """Requests sent by the operator, by verb and resource."""
    return counted(operator.metrics_port, "rljob_operator_api_requests_total", "verb", "resource")


def writes(requests: Counter[tuple[str, ...]]) -> int:
    """Requests that change objects of jobs: no reads, Leases or access reviews."""
    reads = ("get", "list", "watch")
    return sum(
        count for (verb, resource), count in requests.items() if verb not in reads and resource not in _QUESTIONS
    )


def processes(operator: OperatorProcess) -> dict[str, psutil.Process]:
    """The operator and the programs of the cluster, by name."""
    started = {Path(process.cmdline()[0]).name: process for process in psutil.Process().children()}
    return {"operator": operator.process, **{name: started[name] for name in _PROGRAMS if name in started}}


def in_parallel(work: Callable[[Any], object], items: Iterable[Any]) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(work, items))


def namespace_of(number: int) -> str:
    """Return the namespace of the job of this number."""
    return f"{NAMESPACE}-{number // JOBS_PER_NAMESPACE}" if number >= JOBS_PER_NAMESPACE else NAMESPACE


def start_all(api: ResourceClient, resource: str, manifests: Iterable[Object], condition: str) -> dict[str, Any]:
    """Create jobs at once; seconds until all are created, have their pods, and have the condition."""
    wanted = list(manifests)
    for name in {namespace_of(number) for number in range(len(wanted))} - {NAMESPACE}:
        api.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    began = time.time()
    in_parallel(lambda numbered: api.create(resource, numbered[1], namespace_of(numbered[0])), enumerate(wanted))
    submitted = time.time() - began
    there = wait_until_all(api, len(wanted), condition, resource)
    ready = [seconds_after(began, transition(found, condition)) for found in there]
    pods = [seconds_after(began, pod["metadata"]["creationTimestamp"]) for pod in api.list("pods")]
    return {
        "jobs": len(wanted),
        "submitted_seconds": submitted,
        "last_pod_created_seconds": max(pods),
        "median_running_seconds": statistics.median(ready),
        "all_running_seconds": max(ready),
    }


def wait_until_all(api: ResourceClient, count: int, condition: str, resource: str = "rljobs") -> list[Object]:
    """The objects, once the condition is true for `count` of them. Raises TimeoutError after an hour."""
    give_up_at = time.monotonic() + 3600.0
    while True:
        there = [found for found in api.list(resource) if transition(found, condition)]
        print(f"{condition}: {len(there)}/{count}", flush=True)
        if len(there) == count:
            return there
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"expected {count} {resource} with {condition} after an hour, found {len(there)}")
        time.sleep(_LOOK_SECONDS * max(1.0, count / 1000))


def transition(obj: Object, condition: str) -> str:
    """Time at which the condition became true; empty if it is not."""
    conditions = obj.get("status", {}).get("conditions", [])
    return next((c["lastTransitionTime"] for c in conditions if c["type"] == condition and c["status"] == "True"), "")


def seconds_after(began: float, timestamp: str) -> float:
    """Kubernetes stores whole seconds, so the result may be up to one second too small."""
    return datetime.fromisoformat(timestamp).timestamp() - began


@contextmanager
def kwok(plane: ControlPlane) -> Iterator[None]:
    """KWOK simulates the kubelets of all nodes, with the stages of its own module."""
    stages = [
        argument
        for folder in ("node/fast", "pod/fast", "node/heartbeat-with-lease")
        for file in module_files(KWOK_MODULE, f"kustomize/stage/{folder}/*.yaml")
        if file.name != "kustomization.yaml"
        for argument in ("--config", str(file))
    ]
    program = plane.kubectl.with_name("kwok")
    command = [str(program), "--kubeconfig", str(plane.kubeconfig), "--manage-all-nodes", *stages]
    with (plane.directory / "kwok.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def make_nodes(api: ResourceClient, count: int) -> None:
    """Create nodes `node-0`, …; returns when all are ready."""
    in_parallel(lambda number: api.create("nodes", manifests.node(f"node-{number}", {"type": "kwok"})), range(count))
    while not all(is_ready(node) for node in api.list("nodes")):
        time.sleep(_LOOK_SECONDS)


def is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
