"""Cause of a container's end, if memory ran out."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.exit_codes import ExitCode
from rljob_api.quantity import byte_quantity
from rljob_api.step_report import Evidence
from rljob_api.termination_message import TerminationMessage, read_termination_message
from rljob_memory.diagnosis import FailureClass, diagnosed
from rljob_memory.evidence import FailureKind
from rljob_memory.evidence.signatures import match_signature
from rljob_operator.diagnose.container_end import EVICTED, ContainerEnd

_CLASS_OF_CODE = {
    ExitCode.DEVICE_OUT_OF_MEMORY: FailureClass.UNKNOWN,
    ExitCode.HOST_OUT_OF_MEMORY: FailureClass.HOST_MEMORY,
    ExitCode.SHARED_MEMORY_EXHAUSTED: FailureClass.SHARED_MEMORY,
}
_BY_THE_KERNEL, _BY_THE_KUBELET, _BY_THE_EXIT_CODE = 0.98, 0.95, 0.9
_CLASS_OF_EVICTION = {
    FailureKind.HOST: FailureClass.HOST_MEMORY,
    FailureKind.SHARED_MEMORY: FailureClass.SHARED_MEMORY,
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """An out-of-memory failure of a container."""

    class_name: FailureClass

    confidence: float
    """Between 0 and 1."""

    message: str
    """Cause and advice, printable, in one line."""


def explanation_of(end: ContainerEnd) -> Explanation | None:
    """None if the container did not end because memory ran out, as far as kubelet and probe report."""
    if end.reason == "OOMKilled":
        return _by_the_kernel(end)
    if end.reason == EVICTED:
        return _by_the_kubelet(end)
    message = read_termination_message(end.text) if end.text else None
    if message is None or message.exit_code not in _CLASS_OF_CODE:
        return None
    return _by_the_probe(end, message)


def _by_the_kernel(end: ContainerEnd) -> Explanation:
    if end.memory_limit_bytes is None:
        cause = "the kernel killed it (OOMKilled); it has no memory limit, so its node ran out of memory"
    else:
        cause = f"the kernel killed it at its memory limit of {byte_quantity(end.memory_limit_bytes)} (OOMKilled)"
    return _explanation(end, FailureClass.HOST_MEMORY, _BY_THE_KERNEL, f"{cause}.")


def _by_the_kubelet(end: ContainerEnd) -> Explanation | None:
    found = match_signature(end.text)
    class_ = _CLASS_OF_EVICTION.get(found[0]) if found else None
    if class_ is None:
        return None  # for its disk, for example
    return _explanation(end, class_, _BY_THE_KUBELET, f"the kubelet evicted the pod: {end.text}")


def _by_the_probe(end: ContainerEnd, message: TerminationMessage) -> Explanation:
    class_ = _CLASS_OF_CODE[ExitCode(message.exit_code)]
    if message.evidence is None:
        return _explanation(end, class_, _BY_THE_EXIT_CODE, message.message)
    cause = _diagnosed_here(message.evidence)
    found = FailureClass(cause[0])
    if found is FailureClass.UNKNOWN and class_ is not FailureClass.UNKNOWN:
        return _explanation(end, class_, _BY_THE_EXIT_CODE, message.message)
    return _explanation(end, found, cause[1], cause[2])


def _diagnosed_here(evidence: Evidence) -> tuple[str, float, str]:
    """Class, confidence and message of the likeliest cause. Diagnoses that the pod states itself do not count."""
    best = diagnosed(evidence.model_copy(update={"diagnoses": []})).diagnoses[0]
    return best.class_name, best.confidence, best.message


def _explanation(end: ContainerEnd, class_: FailureClass, confidence: float, cause: str) -> Explanation:
    who = f"container {end.container}" if end.container else "the pod"
    text = f"{who} ran out of memory: {class_} ({confidence:.0%}): {cause} {class_.advice}"
    return Explanation(class_, confidence, _printable(text))


def _printable(text: str) -> str:
    """Without control characters, also those of terminals and of writing direction: messages come from any program."""
    return "".join(character if character.isprintable() else " " for character in text)
