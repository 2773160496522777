"""A real API server and controller manager, and helm and kubectl for it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_cluster.binaries import CONTROL_PLANE, binary_directory
from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator.operator_process import BLOCK, port_block
from rljob_testing.patience import eventually

CHART = Path(__file__).parents[3] / "charts" / "rljob-operator"
RELEASE_NAMESPACE = "rljob-system"
RELEASE = "rljob"
NAMES = "rljob-operator"
CRDS = ("crd/rljobs.rljob.dev", "crd/stepreports.rljob.dev", "crd/memoryprofiles.rljob.dev")

Object = dict[str, Any]
Install = Callable[..., None]


@dataclass(frozen=True, slots=True)
class CommandLine:
    """helm and kubectl as an administrator of the cluster."""

    binaries: Path
    environment: dict[str, str]

    def helm(self, *arguments: str) -> str:
        return self._run("helm", *arguments, "--namespace", RELEASE_NAMESPACE)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self._run("kubectl", *arguments, stdin=stdin)

    def get(self, *arguments: str) -> Object:
        found: Object = json.loads(self.kubectl("get", *arguments, "--output", "json"))
        return found

    def may(self, user: str, verb: str, resource: str, namespace: str) -> bool:
        """Ask the API server if `user` may do that. `resource` may name a subresource: pods/exec."""
        resource, _, subresource = resource.partition("/")
        where = ("--subresource", subresource, "--namespace", namespace)
        command = [str(self.binaries / "kubectl"), "auth", "can-i", verb, resource, *where, "--as", user]
        answer = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return answer.stdout.strip() == "yes"

    def serves(self, resource: str) -> bool:
        command = [str(self.binaries / "kubectl"), "get", resource, "--all-namespaces"]
        return subprocess.run(command, env=self.environment, capture_output=True).returncode == 0

    def release_jobs(self) -> None:
        """Take all finalizers off all jobs, so that nothing holds up their deletion."""
        if not self.serves("rljobs"):
            return
        for found in self.get("rljobs", "--all-namespaces")["items"]:
            name, namespace = found["metadata"]["name"], found["metadata"]["namespace"]
            patch = '{"metadata": {"finalizers": null}}'
            self.kubectl("patch", "rljob", name, "-n", namespace, "--type=merge", "-p", patch)

    def apply(self, *objects: Object) -> None:
        self.kubectl("apply", "--server-side", "--filename", "-", stdin=yaml.safe_dump_all(objects))

    def _run(self, program: str, *arguments: str, stdin: str | None = None) -> str:
        command = [str(self.binaries / program), *arguments]
        result = subprocess.run(command, env=self.environment, input=stdin, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"
        return result.stdout


@pytest.fixture(scope="session")
def ports() -> Iterator[Iterator[int]]:
    """Free ports. The control plane takes the first one and the two after it, an operator one of the others."""
    with port_block() as first:
        yield iter((first, *range(first + 3, first + BLOCK - 1)))


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory, ports: Iterator[int]) -> Iterator[ControlPlane]:
    binaries = binary_directory()
    missing = [name for name in (*CONTROL_PLANE, "helm") if not (binaries / name).exists()]
    if missing:
        pytest.skip(f"{binaries} lacks {', '.join(missing)}; `make control-plane` builds them")
    directory = tmp_path_factory.mktemp("control-plane")
    with ControlPlane(directory, base_port=next(ports), controller_manager=True) as control_plane:
        yield control_plane


@pytest.fixture(scope="session")
def command_line(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    helm_home = tmp_path_factory.mktemp("helm")
    folders = {f"HELM_{name}_HOME": str(helm_home / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
    environment = {**os.environ, **folders, "KUBECONFIG": str(control_plane.kubeconfig)}
    command_line = CommandLine(control_plane.kubectl.parent, environment)
    command_line.apply(*(restricted(name) for name in (RELEASE_NAMESPACE, "team-a", "team-b")))
    return command_line


@pytest.fixture
def installed(control_plane: ControlPlane, command_line: CommandLine) -> Iterator[Install]:
    """Installs the chart with helm's arguments; afterwards the release, the jobs and the CRDs are gone."""

    def install(*arguments: str, chart: Path = CHART) -> None:
        command_line.helm("install", RELEASE, str(chart), *arguments)
        control_plane.wait_established()
        eventually(lambda: command_line.serves("rljobs"), "the API server to serve RLJobs")

    yield install
    command_line.release_jobs()
    command_line.helm("uninstall", RELEASE, "--ignore-not-found", "--no-hooks")
    command_line.kubectl("delete", *CRDS, "--ignore-not-found")


def restricted(name: str) -> Object:
    """A namespace that refuses pods which are not `restricted`."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def job(name: str, namespace: str, **metadata: Any) -> Object:
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "spec": {"model": {"uri": "random://qwen3"}, "task": {"name": "digits"}, "algorithm": {"steps": 3}},
    }
