"""A real API server for all tests of this folder, and for each test a namespace of its own."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rljob_client import RLJobClient
from rljob_cluster.binaries import CONTROL_PLANE, require_binaries
from rljob_cluster.commands import ClusterError
from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.installation import install
from rljob_testing.operator.kubelet_server import KubeletServer
from rljob_testing.operator.operator_process import (
    BLOCK,
    OPERATOR_NAMESPACE,
    OperatorProcess,
    forget_leader,
    kept_running,
    port_block,
    restart,
    write_kubeconfig,
)
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import eventually
from rljob_testing.repository import ROOT

NewJob = Callable[..., WatchedJob]
RestartedWith = Callable[..., AbstractContextManager[None]]

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def ports() -> Iterator[Iterator[int]]:
    """Free ports, one after the other; the first three are the control plane's."""
    with port_block() as first:
        yield iter(range(first, first + BLOCK - 1))


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory, ports: Iterator[int]) -> Iterator[ControlPlane]:
    """etcd, API server and controller manager; the project's CRDs are served."""
    base_port, _, _ = (next(ports) for _ in range(3))
    control_plane = ControlPlane(tmp_path_factory.mktemp("control-plane"), base_port=base_port, controller_manager=True)
    try:
        require_binaries(control_plane.kubectl.parent, CONTROL_PLANE)
    except ClusterError as error:
        pytest.skip(f"no Kubernetes API server here: {error}")
    control_plane.start()
    run_kubectl(control_plane, "apply", "-f", str(ROOT / "crds" / "manifests"))
    control_plane.wait_established()
    yield control_plane
    control_plane.kill_api_server()  # asked to end, it would wait for its watchers
    control_plane.stop()


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane) -> ResourceClient:
    """The API server, as an administrator."""
    return ResourceClient.from_kubeconfig(control_plane.kubeconfig)


@pytest.fixture
def new_namespace(api: ResourceClient) -> Iterator[Callable[[], str]]:
    """Makes namespaces that admit only `restricted` pods. They go after the test, with all that is in them."""
    names: list[str] = []

    def new() -> str:
        names.append(f"test-{next(_numbers)}")
        api.create("namespaces", manifests.namespace(names[-1]))
        # The controller manager makes it, and takes its time after a test in which the API server was away.
        found = partial(api.find, "serviceaccounts", "default", names[-1])
        eventually(found, "the namespace's default ServiceAccount")
        return names[-1]

    yield new
    for name in names:
        if api.find("namespaces", name):
            api.delete("namespaces", name)


@pytest.fixture
def namespace(new_namespace: Callable[[], str]) -> str:
    return new_namespace()


@pytest.fixture
def client(control_plane: ControlPlane, namespace: str) -> RLJobClient:
    """The SDK in the test's namespace, as an administrator."""
    return RLJobClient(namespace, kubeconfig=str(control_plane.kubeconfig))


@pytest.fixture
def volume(kubelet_server: KubeletServer, namespace: str, tmp_path: Path) -> Path:
    """The directory of the job `job` on the volume of the test's namespace."""
    kubelet_server.volumes[namespace] = tmp_path / "volume"
    (tmp_path / "volume" / "job").mkdir(parents=True)
    return tmp_path / "volume" / "job"


Kubectl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def kubectl(control_plane: ControlPlane, namespace: str) -> Kubectl:
    """kubectl in the test's namespace: `kubectl("get", "rlj")`, with `stdin` and the output as text."""

    def kubectl(*arguments: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run_kubectl(control_plane, "--namespace", namespace, *arguments, stdin=stdin, check=check)

    return kubectl


def run_kubectl(
    control_plane: ControlPlane, *arguments: str, stdin: str | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    command = [str(control_plane.kubectl), "--kubeconfig", str(control_plane.kubeconfig), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
    return done


def restricted_pod(name: str, **metadata: Any) -> dict[str, Any]:
    """A pod of another workload."""
    context = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    resources = {"limits": {"memory": "512Mi"}}
    container = {"name": "trainer", "image": "trl:1", "securityContext": context, "resources": resources}
    spec = {"restartPolicy": "Never", "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}


# --- the operator ---


SETTINGS: dict[str, object] = {
    "trainer_image": "localhost/rljob/trainer:test",
    "trainer_torch_version": "2.11.0",
    "lease_namespace": OPERATOR_NAMESPACE,
    "shared_account": True,
    "termination_grace_seconds": 5,
    "placement_retry_seconds": 1,
    "restart_delay_seconds": 0.2,
    "status_interval_seconds": 0.2,
    "diagnose_pods": True,
}
"""Seconds in place of the minutes of an installation, except for limits that a busy machine may exceed."""


@pytest.fixture(scope="session")
def proxy(control_plane: ControlPlane, ports: Iterator[int]) -> Iterator[FaultProxy]:
    """Stands between the operator and the API server."""
    proxy = FaultProxy(control_plane.url, control_plane.ca, next(ports))
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture(scope="session")
def kubelet(api: ResourceClient) -> Iterator[SimulatedKubelet]:
    """Two nodes, one with eight GPUs, and the hand that moves their pods."""
    kubelet = SimulatedKubelet(api)
    kubelet.start()
    yield kubelet
    kubelet.stop()


@pytest.fixture(scope="session")
def kubelet_server(
    kubelet: SimulatedKubelet, ports: Iterator[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeletServer]:
    """Answers for both nodes when logs are read and commands are run."""
    server = KubeletServer(tmp_path_factory.mktemp("kubelet"), next(ports))
    server.start()
    kubelet.serve(server.port)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def operator_kubeconfig(
    control_plane: ControlPlane, api: ResourceClient, proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The operator's way to the API server: the chart's rights, through the proxy."""
    token = install(api, control_plane.kubectl.with_name("helm"), OPERATOR_NAMESPACE, diagnose_pods=True)
    return write_kubeconfig(tmp_path_factory.mktemp("operator") / "kubeconfig", proxy.url, token)


@pytest.fixture(scope="session")
def shared_operator(
    operator_kubeconfig: Path, api: ResourceClient, kubelet: SimulatedKubelet, ports: Iterator[int]
) -> Iterator[OperatorProcess]:
    operator = OperatorProcess(
        operator_kubeconfig, operator_kubeconfig.with_name("log"), next(ports), next(ports), SETTINGS
    )
    with kept_running(operator, api):
        yield operator
    if operator.running:
        operator.stop()


@pytest.fixture
def operator(shared_operator: OperatorProcess, api: ResourceClient) -> OperatorProcess:
    """The operator, running; tests share one process, and may kill it."""
    if shared_operator.crashed:  # if it lost its Lease, `kept_running` starts it again
        forget_leader(api)
        shared_operator.start(wait=False)
    shared_operator.wait_ready()
    return shared_operator


@pytest.fixture
def restarted_with(operator: OperatorProcess, api: ResourceClient) -> RestartedWith:
    """A context manager within which the operator has other settings: `with restarted_with(start_timeout_seconds=3)`.

    Pods that are to start while a limit is short can miss it on a busy machine: start them outside.
    """

    @contextmanager
    def restarted(**changes: object) -> Iterator[None]:
        usual, operator.settings = operator.settings, {**operator.settings, **changes}
        restart(operator, api)
        try:
            yield
        finally:
            operator.settings = usual
            restart(operator, api)

    return restarted


@pytest.fixture
def job(new_job: NewJob, namespace: str) -> WatchedJob:
    """A job in the test's namespace, not yet created, and an operator that looks after it."""
    return new_job(namespace)


@pytest.fixture
def new_job(
    operator: OperatorProcess, api: ResourceClient, kubelet: SimulatedKubelet, new_namespace: Callable[[], str]
) -> Iterator[NewJob]:
    """Returns jobs that are not yet created: `new_job(namespace, name)`, or in a namespace of its own, `new_job()`."""
    namespaces: set[str] = set()

    def new(namespace: str = "", name: str = "job") -> WatchedJob:
        job = WatchedJob(api, kubelet, namespace or new_namespace(), name)
        namespaces.add(job.namespace)
        return job

    yield new
    for namespace in namespaces:
        kubelet.follow(namespace)  # its pods end as the namespace is deleted
