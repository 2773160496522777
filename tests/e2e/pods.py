"""Small pods for tests, as the restricted Pod Security Standard wants them."""

from __future__ import annotations

from typing import Any

RESTRICTED_POD = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "fsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
RESTRICTED_CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def shell_pod(name: str, image: str, script: str) -> dict[str, Any]:
    """A pod whose one container, `shell`, runs the script."""
    container: dict[str, Any] = {
        "name": "shell",
        "image": image,
        "args": [script],
        "securityContext": RESTRICTED_CONTAINER,
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "securityContext": RESTRICTED_POD,
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def phase(pod: dict[str, Any]) -> str:
    return str(pod["status"].get("phase", ""))


def is_unschedulable(pod: dict[str, Any]) -> bool:
    """The scheduler has found no node for the pod."""
    return any(condition.get("reason") == "Unschedulable" for condition in pod["status"].get("conditions") or ())
