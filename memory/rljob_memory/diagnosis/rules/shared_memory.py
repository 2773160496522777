"""/dev/shm is full. By default it has 64 MiB in a container. NCCL, torch's data workers and Ray write there.

Writing to a new page of a full /dev/shm causes a bus error; so does a damaged file mapping.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.host import is_nearly_full
from rljob_memory.sizes import human_bytes


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
