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


def shell_pod(
    name: str,
    image: str,
    script: str,
    *,
    node: str | None = None,
    limits: dict[str, str] | None = None,
    claim: str | None = None,
) -> dict[str, Any]:
    """A pod whose one container, `shell`, runs the script; the claim is mounted at /data."""
    container: dict[str, Any] = {
        "name": "shell",
        "image": image,
        "args": [script],
        "resources": {"limits": limits or {}},
        "securityContext": RESTRICTED_CONTAINER,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}] if claim else [],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "securityContext": RESTRICTED_POD,
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}] if claim else [],
        "nodeSelector": {"kubernetes.io/hostname": node} if node else {},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def phase(pod: dict[str, Any]) -> str:
    return str(pod["status"].get("phase", ""))


def is_unschedulable(pod: dict[str, Any]) -> bool:
    """The scheduler has found no node for the pod."""
    return any(condition.get("reason") == "Unschedulable" for condition in pod["status"].get("conditions") or ())


def restarts(pod: dict[str, Any]) -> int:
    """Restarts of the pod's first container; 0 before the kubelet has reported it."""
    statuses = pod["status"].get("containerStatuses") or [{}]
    return int(statuses[0].get("restartCount", 0))


def terminated(pod: dict[str, Any]) -> dict[str, Any] | None:
    """The terminated state of the pod's first container; None while it runs."""
    statuses = pod["status"].get("containerStatuses") or [{}]
    ended: dict[str, Any] | None = statuses[0].get("state", {}).get("terminated")
    return ended
