"""Containers of labelled pods that ended, and the cause if memory ran out. Pods are untrusted input."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_failure import FailureKind
from rljob_api.quantity import byte_quantity
from rljob_api.termination_message import MAX_TERMINATION_MESSAGE_BYTES, read_termination_message
from rljob_memory.diagnosis import FailureClass, diagnosed
from rljob_memory.evidence.signatures import failure_kind
from rljob_operator.events import Subject
from rljob_operator.observe.pod_facts import memory_bytes
from rljob_operator.reconcile.memory_recovery import CLASS_OF_CODE, CONFIDENCE_OF_EXIT_FACTS

_MAX_CONTAINERS = 16
_MAX_REASON_CHARACTERS = 64
_EVICTED = "Evicted"


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """One termination of one container."""

    namespace: str
    pod: str
    pod_uid: str
    owner: Subject | None
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
    """Yield present and last terminations of the pod's containers that did not exit with code 0, and its eviction.

    Init containers count, too: sidecar containers are among them, and may be the program itself.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    limits = {
        c["name"]: memory_bytes(c, "limits") for kind in ("containers", "initContainers") for c in _list(spec, kind)
    }
    for container in (*_list(status, "containerStatuses"), *_list(status, "initContainerStatuses")):
        for state in ("lastState", "state"):
            terminated = (container.get(state) or {}).get("terminated")
            if terminated and terminated.get("exitCode"):
                yield _end(pod, container["name"], terminated, limits.get(container["name"]))
    if status.get("reason") == _EVICTED:
        # An eviction has no exit code, and happens once in the life of a pod.
        yield _end(pod, "", {"reason": _EVICTED, "message": status.get("message"), "exitCode": 1}, None)


def _list(part: dict[str, Any], field: str) -> list[dict[str, Any]]:
    return (part.get(field) or [])[:_MAX_CONTAINERS]


def _end(pod: dict[str, Any], container: str, terminated: dict[str, Any], limit: int | None) -> ContainerEnd:
    metadata, finished_at = pod["metadata"], terminated.get("finishedAt")
    return ContainerEnd(
        namespace=metadata["namespace"],
        pod=metadata["name"],
        pod_uid=metadata["uid"],
        owner=controller_of(metadata, metadata["namespace"]),
        container=container,
        exit_code=int(terminated["exitCode"]),
        reason=str(terminated.get("reason") or "")[:_MAX_REASON_CHARACTERS],
        text=str(terminated.get("message") or "")[:MAX_TERMINATION_MESSAGE_BYTES],
        finished_at=datetime.fromisoformat(finished_at).astimezone(UTC) if finished_at else None,
        memory_limit_bytes=limit,
    )


def controller_of(metadata: dict[str, Any], namespace: str) -> Subject | None:
    """Return the owner with `controller: true`, as the object's author wrote it; None if there is none."""
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller"):
            api_version, kind, name, uid = (str(owner.get(f) or "") for f in ("apiVersion", "kind", "name", "uid"))
            return Subject(api_version, kind, namespace, name, uid)
    return None


# --- The cause ---


_CLASS_OF_EVICTION = {
    FailureKind.HOST: FailureClass.HOST_MEMORY,
    FailureKind.SHARED_MEMORY: FailureClass.SHARED_MEMORY,
}


@dataclass(frozen=True, slots=True)
class OutOfMemoryCause:
    """An out-of-memory failure of a container."""

    class_name: FailureClass
    message: str
    """Cause and advice, printable, in one line."""


def explanation_of(end: ContainerEnd) -> OutOfMemoryCause | None:
    """Return the cause; None if memory did not run out, as far as kubelet and probe report."""
    if end.reason == "OOMKilled":
        return _cause(end, FailureClass.HOST_MEMORY, CONFIDENCE_OF_EXIT_FACTS, _kernel_kill(end.memory_limit_bytes))
    if end.reason == _EVICTED:
        kind = failure_kind(end.text)
        class_ = _CLASS_OF_EVICTION.get(kind) if kind else None
        if class_ is None:
            return None  # for its disk, for example
        return _cause(end, class_, CONFIDENCE_OF_EXIT_FACTS, f"the kubelet evicted the pod: {end.text}")
    message = read_termination_message(end.text) if end.text else None
    if message is None or message.exit_code not in CLASS_OF_CODE:
        return None
    class_ = CLASS_OF_CODE[ExitCode(message.exit_code)]
    if message.evidence is not None:
        # Diagnoses that the pod states itself do not count.
        best = diagnosed(message.evidence.model_copy(update={"diagnoses": []})).diagnoses[0]
        if best.class_name != FailureClass.UNKNOWN or class_ is FailureClass.UNKNOWN:
            return _cause(end, FailureClass(best.class_name), best.confidence, best.message)
    return _cause(end, class_, CONFIDENCE_OF_EXIT_FACTS, message.message)


def _kernel_kill(memory_limit_bytes: int | None) -> str:
    if memory_limit_bytes is None:
        return "the kernel killed it (OOMKilled); it has no memory limit, so its node ran out of memory."
    return f"the kernel killed it at its memory limit of {byte_quantity(memory_limit_bytes)} (OOMKilled)."


def _cause(end: ContainerEnd, class_: FailureClass, confidence: float, message: str) -> OutOfMemoryCause:
    subject = f"container {end.container}" if end.container else "the pod"
    text = f"{subject} ran out of memory: {class_} ({confidence:.0%}): {message} {class_.advice}"
    # No control characters, also those of terminals and of writing direction: messages come from any program.
    printable = "".join(character if character.isprintable() else " " for character in text)
    return OutOfMemoryCause(class_, printable)
