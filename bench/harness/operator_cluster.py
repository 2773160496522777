"""A control plane and an operator for benchmarks."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.installation import install
from rljob_testing.operator.operator_process import OperatorProcess, write_kubeconfig
from rljob_testing.repository import ROOT

NAMESPACE = "bench"
OPERATOR_NAMESPACE = "rljob-system"
_SAMPLE_SECONDS = 0.5
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


def installed_operator(plane: ControlPlane, base_port: int, url: str | None = None) -> OperatorProcess:
    """An operator with the permissions of the chart and the settings of an installation, not started. `url`: address of
    a proxy to use."""
    token = install(ApiClient.from_kubeconfig(plane.kubeconfig), plane.kubectl.with_name("helm"), OPERATOR_NAMESPACE)
    ca = None if url else plane.ca
    kubeconfig = write_kubeconfig(plane.directory / "operator.kubeconfig", url or plane.url, token, ca)
    settings = {
        "trainer_image": "localhost/rljob/trainer",
        "trainer_torch_version": "2.13.0",
        "lease_namespace": OPERATOR_NAMESPACE,
        "shared_account": True,
        "metrics_auth": False,
        "metrics_tls": False,
    }
    return OperatorProcess(kubeconfig, plane.directory / "operator.log", base_port, base_port + 1, settings)


def operator_requests(operator: OperatorProcess) -> Counter[tuple[str, str]]:
    """Requests sent by the operator, by verb and resource, from its metrics."""
    text = httpx.get(f"http://127.0.0.1:{operator.metrics_port}/metrics").raise_for_status().text
    requests: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "rljob_operator_api_requests_total":
                requests[sample.labels["verb"], sample.labels["resource"]] += int(sample.value)
    return requests


def writes(requests: Counter[tuple[str, str]]) -> int:
    """Requests that change objects of jobs: no reads, Leases or access reviews."""
    reads = ("get", "list", "watch")
    return sum(
        count for (verb, resource), count in requests.items() if verb not in reads and resource not in _QUESTIONS
    )


@dataclass
class MemoryWatch:
    """Peak resident memory of processes, sampled twice a second within the block."""

    processes: dict[str, psutil.Process]
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """By name of the process."""
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            for name, process in self.processes.items():
                self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), process.memory_info().rss)


def processes(operator: OperatorProcess) -> dict[str, psutil.Process]:
    """The operator and the programs of the cluster, by name."""
    started = {Path(process.cmdline()[0]).name: process for process in psutil.Process().children()}
    return {"operator": operator.process, **{name: started[name] for name in _PROGRAMS if name in started}}
