"""Plays the scheduler and the kubelets: places, starts, ends and removes pods as a test requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import httpx

from rljob_api.termination_message import TerminationMessage
from rljob_operator import labels
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import RequestRefused, ResourceClient

Pod = dict[str, Any]

CPU_NODE, GPU_NODE = "cpu-node", "gpu-node"

_READER_PODS = "app.kubernetes.io/name=rljob-fetch"
_ROUND_SECONDS = 0.1
_HEARTBEAT_SECONDS = 10.0


class SimulatedKubelet:
    """Moves pods through the real API. In namespaces that it `follow`s, pods behave as on healthy nodes; elsewhere they
    move only on request.
    """

    def __init__(self, api: ResourceClient) -> None:
        self._api = api
        self._namespaces: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._next_heartbeat = 0.0

    def pods(self, namespace: str, role: str | None = None) -> list[Pod]:
        """All job pods of the namespace, or those of one role, by name."""
        selector = labels.ROLE if role is None else f"{labels.ROLE}={role}"
        return sorted(self._api.list("pods", namespace, selector), key=lambda pod: str(pod["metadata"]["name"]))

    def reader_pods(self, namespace: str | None = None) -> list[Pod]:
        """Pods of `rljob fetch`."""
        return self._api.list("pods", namespace, _READER_PODS)

    def place(self, pod: Pod, node: str) -> None:
        """Act as the scheduler."""
        namespace, name = _key(pod)
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        self._api.create_below("pods", name, "binding", binding, namespace)

    def run(self, pod: Pod, ready: bool = True) -> None:
        state = {"running": {"startedAt": _now()}}
        self._status(pod, _status("Running", state, ready=ready))

    def end(self, pod: Pod, exit_code: int, reason: str = "", message: str | TerminationMessage = "") -> None:
        """End the container. `reason`: as the kubelet reports it; by default Completed or Error, by the exit code."""
        text = message if isinstance(message, str) else message.to_json().decode()
        terminated = {
            "exitCode": exit_code,
            "reason": reason or ("Error" if exit_code else "Completed"),
            "message": text,
            "finishedAt": _now(),
        }
        phase = "Failed" if exit_code else "Succeeded"
        self._status(pod, _status(phase, {"terminated": terminated}, ready=False, restarts=_restarts(pod)))

    def restart(self, pod: Pod, times: int = 1) -> None:
        """Restart all containers in place."""
        state = {"running": {"startedAt": _now()}}
        self._status(pod, _status("Running", state, ready=True, restarts=_restarts(pod) + times))

    def vanish(self, pod: Pod) -> None:
        """Remove the pod without a status, as if its node were removed."""
        namespace, name = _key(pod)
        self._api.delete("pods", name, namespace, grace_seconds=0)

    # --- healthy nodes ---

    def follow(self, namespace: str) -> None:
        """From now on, place and start pods that are not gated, and remove those that are being deleted."""
        self._namespaces.add(namespace)

    def leave(self, namespace: str) -> None:
        """From now on, move pods only on request."""
        self._namespaces.discard(namespace)

    def start(self) -> None:
        for name, labels_, gpus in ((CPU_NODE, {}, 0), (GPU_NODE, {"nvidia.com/gpu.present": "true"}, 8)):
            self._api.create("nodes", manifests.node(name, labels_))
            self.set_gpus(name, gpus)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def set_gpus(self, node: str, gpus: int) -> None:
        """Act as a device plugin; 0: the node has no GPU resource."""
        self._api.merge("nodes", node, {"status": manifests.node_status(gpus)}, subresource="status")

    def serve(self, port: int) -> None:
        """Name the port on which a `KubeletServer` answers for both nodes."""
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        }
        for node in (CPU_NODE, GPU_NODE):
            self._api.merge("nodes", node, {"status": status}, subresource="status")

    def declare(self, *features: str) -> None:
        """Set the declared features of both nodes."""
        for node in (CPU_NODE, GPU_NODE):
            self._api.merge("nodes", node, {"status": {"declaredFeatures": list(features)}}, subresource="status")

    def _work(self) -> None:
        while not self._stop.wait(_ROUND_SECONDS):
            with suppress(httpx.TransportError), _only_own_mistakes():  # some tests stop the API server
                self._heartbeat()
                pods = self._api.list("pods", selector=labels.ROLE)
                for pod in (*pods, *self.reader_pods()):
                    if pod["metadata"]["namespace"] in self._namespaces:
                        self._care_for(pod)

    def _heartbeat(self) -> None:
        """Without it, the controller manager considers the nodes lost after 50 s."""
        if time.monotonic() < self._next_heartbeat:
            return
        self._next_heartbeat = time.monotonic() + _HEARTBEAT_SECONDS
        for name in (CPU_NODE, GPU_NODE):
            ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": _now()}
            self._api.patch_status("nodes", name, {"conditions": [ready]})

    def _care_for(self, pod: Pod) -> None:
        status = pod["status"]
        with _only_own_mistakes():
            if "deletionTimestamp" in pod["metadata"]:
                if status["phase"] == "Running":
                    self.end(pod, 143)
                self.vanish(pod)
            elif "nodeName" not in pod["spec"]:
                if not pod["spec"].get("schedulingGates"):
                    self.place(pod, node_for(pod))
            elif status["phase"] == "Pending":
                self.run(pod)

    def _status(self, pod: Pod, status: dict[str, Any]) -> None:
        namespace, name = _key(pod)
        for container in status["containerStatuses"]:  # without them, the API server refuses to resize the pod
            container["name"] = pod["spec"]["containers"][0]["name"]
            container["resources"] = pod["spec"]["containers"][0].get("resources", {})
        self._api.patch_status("pods", name, status, namespace)


@contextmanager
def _only_own_mistakes() -> Iterator[None]:
    """Ignore errors about pods that are gone or changed, and about an API server that is starting."""
    try:
        yield
    except RequestRefused as error:
        if error.status in (400, 422):
            raise


def node_for(pod: Pod) -> str:
    """The node of the two-node cluster that has room."""
    limits = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return GPU_NODE if any("gpu" in resource for resource in limits) else CPU_NODE


def _restarts(pod: Pod) -> int:
    return sum(status["restartCount"] for status in pod["status"].get("containerStatuses", []))


def _status(phase: str, state: dict[str, Any], *, ready: bool, restarts: int = 0) -> dict[str, Any]:
    container = {
        "state": state,
        "ready": ready,
        "started": "running" in state,
        "restartCount": restarts,
        "image": "trainer",
        "imageID": "trainer",
    }
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Ready", "status": "True" if ready else "False"},
    ]
    return {"phase": phase, "conditions": conditions, "containerStatuses": [container], "startTime": _now()}


def _key(pod: Pod) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
