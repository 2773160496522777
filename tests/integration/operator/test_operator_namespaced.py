"""An operator that looks after listed namespaces, with rights in them alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import eventually, holds_for
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.installation import install
from rljob_testing.operator.operator_process import OperatorProcess, write_kubeconfig
from rljob_testing.operator.restarts import kept_running
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from tests.integration.operator.conftest import SETTINGS


def test_it_needs_no_right_elsewhere_and_acts_nowhere_else(
    control_plane: ControlPlane,
    api: ApiClient,
    kubelet: SimulatedKubelet,
    shared_operator: OperatorProcess,
    namespace: str,
    ports: Iterator[int],
    tmp_path: Path,
) -> None:
    if not shared_operator.crashed:
        shared_operator.stop()
    api.create("namespaces", manifests.namespace("elsewhere"))
    proxy = FaultProxy(control_plane.url, control_plane.ca, next(ports))
    proxy.start()
    token = install(api, control_plane.kubectl.with_name("helm"), "one-namespace", [namespace])
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", proxy.url, token)
    settings = SETTINGS | {"namespaces": namespace, "lease_namespace": "one-namespace"}
    operator = OperatorProcess(kubeconfig, tmp_path / "log", next(ports), next(ports), settings)
    operator.start()
    with kept_running(operator, api, "one-namespace"):
        try:
            elsewhere = WatchedJob(api, kubelet, "elsewhere").create()
            job = WatchedJob(api, kubelet, namespace).create()
            job.run()
            job.complete()
            job.delete()
            job.wait_gone()
            holds_for(1.0, lambda: not elsewhere.status and not elsewhere.pods, "no word about a job elsewhere")
            refused = [str(request) for request in proxy.requests if request.status == 403]
            assert refused == []
        finally:
            operator.stop()
            proxy.stop()
            api.delete("namespaces", "elsewhere")


def test_a_namespace_that_is_lost_stops_no_other_namespace(
    control_plane: ControlPlane,
    api: ApiClient,
    kubelet: SimulatedKubelet,
    shared_operator: OperatorProcess,
    namespace: str,
    ports: Iterator[int],
    tmp_path: Path,
) -> None:
    if not shared_operator.crashed:
        shared_operator.stop()
    api.create("namespaces", manifests.namespace("lost"))
    token = install(api, control_plane.kubectl.with_name("helm"), "two-namespaces", [namespace, "lost"])
    proxy = FaultProxy(control_plane.url, control_plane.ca, next(ports))
    proxy.start()
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", proxy.url, token)
    settings = SETTINGS | {"namespaces": f"{namespace} lost", "lease_namespace": "two-namespaces"}
    operator = OperatorProcess(kubeconfig, tmp_path / "log", next(ports), next(ports), settings)
    operator.start()
    with kept_running(operator, api, "two-namespaces"):
        try:
            lost = WatchedJob(api, kubelet, "lost").create()
            lost.wait_for_pods(2)
            assert "finalizers" not in lost.object["metadata"]
            api.delete("namespaces", "lost")
            eventually(lambda: api.find("namespaces", "lost") is None, "the namespace to be gone")
            operator.stop()
            operator.start()
            assert operator.probe("healthz") == 200
            job = WatchedJob(api, kubelet, namespace).create()
            job.run()
            job.complete()
            assert "namespace unattended" in operator.log.read_text()
        finally:
            operator.stop()
            proxy.stop()
