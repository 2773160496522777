"""Rules for host memory and /dev/shm."""

from __future__ import annotations

import re

from rljob_api.memory_failure import Activity
from rljob_memory.diagnosis.classes import Diagnosis, FailureClass
from rljob_memory.diagnosis.growth import host_growth
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.host import is_nearly_full
from rljob_memory.sizes import human_bytes

# Host memory, of the machine or the container: the kernel, the kubelet, Ray's monitor and malloc report it.
#
# A bare SIGKILL (exit code 137, signal 9) is mostly the kernel's out-of-memory killer, but also a preemption, a failed
# liveness probe, or a person. Pinning host memory fails with the message of a full GPU: `CUDA error: out of memory`.

_OF_ONE_REQUEST = re.compile(r"Cannot allocate memory|\bENOMEM\b|bad_alloc|\bMemoryError|heap")
"""A request of one process failed: limits of the process, its heap or its locked memory fail in the same way."""
_AFTER_GROWTH = 0.75
_END = {FailureKind.KILLED: "killed by SIGKILL", FailureKind.LOST: "lost, perhaps killed by SIGKILL"}


def host_memory(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    match failure.kind:
        case FailureKind.HOST:
            confidence = 0.75 if _OF_ONE_REQUEST.search(failure.text) and not failure.sizes else 0.95
            return Diagnosis(
                FailureClass.HOST_MEMORY,
                confidence,
                f"The memory of the host or of the container ran out{_sizes(failure)}",
            )
        case FailureKind.KILLED | FailureKind.LOST:
            return _killed(failure, evidence)
        case FailureKind.UNFAMILIAR if failure.of_the_gpu is False:
            return Diagnosis(
                FailureClass.HOST_MEMORY, 0.55, f"A program reported a shortage of host memory: “{failure.text[:160]}”"
            )
        case FailureKind.OBJECT_STORE:
            return Diagnosis(FailureClass.HOST_MEMORY, 0.3, "Ray's object store, a part of host memory, is full")
        case FailureKind.DRIVER | FailureKind.NCCL if failure.activity in (Activity.PINNING, Activity.SLEEP):
            return Diagnosis(
                FailureClass.HOST_MEMORY,
                0.65,
                "Pinning host memory failed; CUDA reports this with the error of a full GPU",
            )
        case _:
            return None


def _killed(failure: Failure, evidence: CollectedEvidence) -> Diagnosis:
    """Distinguishes a kill by the kernel from others, by the container's numbers."""
    host = evidence.host
    if host.oom_kills:
        confidence, why = 0.9, f"the kernel's out-of-memory killer has killed {host.oom_kills} in the container"
    elif is_nearly_full(host.host_used_bytes, host.host_limit_bytes):
        confidence, why = 0.8, "the container was at its memory limit"
    else:
        confidence = 0.4 if failure.kind is FailureKind.LOST else 0.55
        why = "the usual sender is the kernel, at the memory limit"
        if grown := host_growth(evidence.series):
            series, trend = grown[0], grown[1].trend
            confidence = max(confidence, _AFTER_GROWTH)
            why = (
                f"host memory in the log ({series.name}) grew from {human_bytes(trend.first_bytes)} to "
                f"{human_bytes(trend.last_bytes)}"
            )
    return Diagnosis(
        FailureClass.HOST_MEMORY, confidence, f"A process was {_END[failure.kind]}; {why}", _host_numbers(evidence)
    )


def _host_numbers(evidence: CollectedEvidence) -> dict[str, int]:
    host = evidence.host
    known = {"used_bytes": host.host_used_bytes, "limit_bytes": host.host_limit_bytes, "oom_kills": host.oom_kills}
    return {name: value for name, value in known.items() if value}


def _sizes(failure: Failure) -> str:
    sizes = failure.sizes
    if "used_bytes" in sizes and "limit_bytes" in sizes:
        return f": {human_bytes(sizes['used_bytes'])} of {human_bytes(sizes['limit_bytes'])} were in use"
    if "used_bytes" in sizes:
        return f": the killed process held {human_bytes(sizes['used_bytes'])}"
    if "wanted_bytes" in sizes:
        return f": {human_bytes(sizes['wanted_bytes'])} more did not fit"
    return ""


# /dev/shm is full. By default it has 64 MiB in a container. NCCL, torch's data workers and Ray write there.
#
# Writing to a new page of a full /dev/shm causes a bus error; so does a damaged file mapping.


def shared_memory(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    wanted = failure.sizes.get("wanted_bytes")
    more = f": {human_bytes(wanted)} more did not fit" if wanted is not None else ""
    match failure.kind:
        case FailureKind.SHARED_MEMORY:
            return Diagnosis(FailureClass.SHARED_MEMORY, 0.95, f"/dev/shm is full{more}")
        case FailureKind.SHARED_SEGMENT:
            return Diagnosis(
                FailureClass.SHARED_MEMORY,
                0.6,
                f"NCCL could not create a segment in /dev/shm; the usual cause is a full /dev/shm{more}",
            )
        case FailureKind.SEMAPHORE:
            return Diagnosis(
                FailureClass.SHARED_MEMORY, 0.75, "A semaphore, which is a file in /dev/shm, found no space left there"
            )
        case FailureKind.BUS_ERROR:
            return _bus_error(evidence)
        case FailureKind.OBJECT_STORE:
            return Diagnosis(FailureClass.SHARED_MEMORY, 0.7, f"Ray's object store in /dev/shm is full{more}")
        case _:
            return None


def _bus_error(evidence: CollectedEvidence) -> Diagnosis:
    host = evidence.host
    if not host.shared_memory_bytes:
        confidence, why = 0.7, "the usual cause is a full /dev/shm"
    else:
        used, size = host.shared_memory_used_bytes, host.shared_memory_bytes
        confidence = 0.9 if is_nearly_full(used, size) else 0.4
        why = f"{human_bytes(used)} of /dev/shm's {human_bytes(size)} were in use"
    return Diagnosis(FailureClass.SHARED_MEMORY, confidence, f"A process died of a bus error; {why}")
