"""Evidence of an out-of-memory failure, and its readers: of exceptions, logs, messages, snapshots and runs."""

from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.exception import failure_of_exception
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.read import Unreadable, evidence_around, read_evidence

__all__ = [
    "CollectedEvidence",
    "Failure",
    "FailureKind",
    "Unreadable",
    "evidence_around",
    "failure_of_exception",
    "read_evidence",
]
