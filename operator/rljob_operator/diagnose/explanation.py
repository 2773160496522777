"""Containers of labelled pods that ended, and the cause if memory ran out. Pods are untrusted input."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_failure import FailureKind
from rljob_api.quantity import byte_quantity, quantity_bytes
from rljob_api.step_report import Evidence
from rljob_api.termination_message import MAX_TERMINATION_MESSAGE_BYTES, TerminationMessage, read_termination_message
from rljob_memory.diagnosis import FailureClass, diagnosed
from rljob_memory.evidence.signatures import failure_kind

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


# --- The cause ---


_CLASS_OF_CODE = {
    ExitCode.DEVICE_OUT_OF_MEMORY: FailureClass.UNKNOWN,
    ExitCode.HOST_OUT_OF_MEMORY: FailureClass.HOST_MEMORY,
    ExitCode.SHARED_MEMORY_EXHAUSTED: FailureClass.SHARED_MEMORY,
}
_EXIT_FACTS = 0.95
"""Confidence in the kubelet's report of how a container ended."""
_CLASS_OF_EVICTION = {
    FailureKind.HOST: FailureClass.HOST_MEMORY,
    FailureKind.SHARED_MEMORY: FailureClass.SHARED_MEMORY,
}


@dataclass(frozen=True, slots=True)
class OutOfMemoryCause:
    """An out-of-memory failure of a container."""

    class_name: FailureClass

    confidence: float
    """Between 0 and 1."""

    message: str
    """Cause and advice, printable, in one line."""


def explanation_of(end: ContainerEnd) -> OutOfMemoryCause | None:
    """None if the container did not end because memory ran out, as far as kubelet and probe report."""
    if end.reason == "OOMKilled":
        return _by_the_kernel(end)
    if end.reason == EVICTED:
        return _by_the_kubelet(end)
    message = read_termination_message(end.text) if end.text else None
    if message is None or message.exit_code not in _CLASS_OF_CODE:
        return None
    return _by_the_probe(end, message)


def _by_the_kernel(end: ContainerEnd) -> OutOfMemoryCause:
    if end.memory_limit_bytes is None:
        cause = "the kernel killed it (OOMKilled); it has no memory limit, so its node ran out of memory"
    else:
        cause = f"the kernel killed it at its memory limit of {byte_quantity(end.memory_limit_bytes)} (OOMKilled)"
    return _explanation(end, FailureClass.HOST_MEMORY, _EXIT_FACTS, f"{cause}.")


def _by_the_kubelet(end: ContainerEnd) -> OutOfMemoryCause | None:
    kind = failure_kind(end.text)
    class_ = _CLASS_OF_EVICTION.get(kind) if kind else None
    if class_ is None:
        return None  # for its disk, for example
    return _explanation(end, class_, _EXIT_FACTS, f"the kubelet evicted the pod: {end.text}")


def _by_the_probe(end: ContainerEnd, message: TerminationMessage) -> OutOfMemoryCause:
    class_ = _CLASS_OF_CODE[ExitCode(message.exit_code)]
    if message.evidence is None:
        return _explanation(end, class_, _EXIT_FACTS, message.message)
    cause = _diagnosed_here(message.evidence)
    found = FailureClass(cause[0])
    if found is FailureClass.UNKNOWN and class_ is not FailureClass.UNKNOWN:
        return _explanation(end, class_, _EXIT_FACTS, message.message)
    return _explanation(end, found, cause[1], cause[2])


def _diagnosed_here(evidence: Evidence) -> tuple[str, float, str]:
    """Class, confidence and message of the likeliest cause. Diagnoses that the pod states itself do not count."""
    best = diagnosed(evidence.model_copy(update={"diagnoses": []})).diagnoses[0]
    return best.class_name, best.confidence, best.message


def _explanation(end: ContainerEnd, class_: FailureClass, confidence: float, cause: str) -> OutOfMemoryCause:
    who = f"container {end.container}" if end.container else "the pod"
    text = f"{who} ran out of memory: {class_} ({confidence:.0%}): {cause} {class_.advice}"
    return OutOfMemoryCause(class_, confidence, _printable(text))


def _printable(text: str) -> str:
    """Without control characters, also those of terminals and of writing direction: messages come from any program."""
    return "".join(character if character.isprintable() else " " for character in text)
