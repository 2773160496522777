"""Evidence of an out-of-memory failure, and its readers: of exceptions, logs, messages, snapshots and runs."""

from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.exception import account_of
from rljob_memory.evidence.failure import KUBELETS_REPORT, Failure, FailureKind
from rljob_memory.evidence.read import Unreadable, evidence_of_run, read_evidence

__all__ = [
    "KUBELETS_REPORT",
    "CollectedEvidence",
    "Failure",
    "FailureKind",
    "Unreadable",
    "account_of",
    "evidence_of_run",
    "read_evidence",
]
