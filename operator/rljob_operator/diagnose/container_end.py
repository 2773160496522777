"""Containers of a pod that ended, in the bounded form that a diagnosis needs. Pods are untrusted input."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rljob_api.quantity import quantity_bytes
from rljob_api.termination_message import MAX_TERMINATION_MESSAGE_BYTES

_MOST_CONTAINERS = 16
_LONGEST_REASON = 64
EVICTED = "Evicted"


@dataclass(frozen=True, slots=True)
class Owner:
    """A reference to the controller of an object, as the object's author wrote it."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """One termination of one container."""

    namespace: str
    pod: str
    pod_uid: str
    owner: Owner | None
    """Controller of the pod, unverified."""
    container: str
    """Name; empty if the kubelet evicted the pod as a whole."""
    exit_code: int
    reason: str
    """The kubelet's: OOMKilled, Error, Completed, Evicted."""
    text: str
    """Termination message, or the kubelet's message about an eviction; at most 4,096 characters."""
    finished_at: datetime | None
    memory_limit_bytes: int | None

    @property
    def key(self) -> str:
        """Identifies this termination, in this and later processes of the operator."""
        finished = self.finished_at.isoformat() if self.finished_at else ""
        return hashlib.sha256("\0".join((self.pod_uid, self.container, finished)).encode()).hexdigest()[:16]


def container_ends(pod: dict[str, Any]) -> Iterator[ContainerEnd]:
    """Present and last terminations of the pod's containers that did not exit with code 0, and its eviction.

    Init containers count, too: sidecar containers are among them, and may be the program itself.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    limits = {c["name"]: c for kind in ("containers", "initContainers") for c in _first(spec.get(kind))}
    for container in (*_first(status.get("containerStatuses")), *_first(status.get("initContainerStatuses"))):
        for state in ("lastState", "state"):
            terminated = (container.get(state) or {}).get("terminated")
            if terminated and terminated.get("exitCode"):
                limit = _memory_limit_bytes(limits.get(container["name"]) or {})
                yield _end(pod, container["name"], terminated, limit)
    if status.get("reason") == EVICTED:
        # An eviction has no exit code, and happens once in the life of a pod.
        yield _end(pod, "", {"reason": EVICTED, "message": status.get("message"), "exitCode": 1}, None)


def _first(containers: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    return (containers or [])[:_MOST_CONTAINERS]


def _end(pod: dict[str, Any], container: str, terminated: dict[str, Any], limit: int | None) -> ContainerEnd:
    metadata = pod["metadata"]
    finished_at = terminated.get("finishedAt")
    return ContainerEnd(
        namespace=metadata["namespace"],
        pod=metadata["name"],
        pod_uid=metadata["uid"],
        owner=controller_of(metadata),
        container=container,
        exit_code=int(terminated["exitCode"]),
        reason=str(terminated.get("reason") or "")[:_LONGEST_REASON],
        text=str(terminated.get("message") or "")[:MAX_TERMINATION_MESSAGE_BYTES],
        finished_at=datetime.fromisoformat(finished_at).astimezone(UTC) if finished_at else None,
        memory_limit_bytes=limit,
    )


def controller_of(metadata: dict[str, Any]) -> Owner | None:
    """The owner reference with `controller: true`."""
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller"):
            return Owner(*(str(owner.get(name) or "") for name in ("apiVersion", "kind", "name", "uid")))
    return None


def _memory_limit_bytes(container: dict[str, Any]) -> int | None:
    limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
    try:
        return quantity_bytes(limit) if limit else None
    except ValueError:
        return None
