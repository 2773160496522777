"""What was seen around an out-of-memory failure, and the readers that find it: in logs, messages, snapshots, runs."""

from rljob_memory.evidence.evidence import Evidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.read import Unreadable, read_evidence

__all__ = ["Evidence", "Failure", "FailureKind", "Unreadable", "read_evidence"]
