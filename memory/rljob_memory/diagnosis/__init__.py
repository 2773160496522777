"""Diagnosis of an out-of-memory failure: class of the cause, confidence, numbers, message, advice."""

from rljob_memory.diagnosis.classes import Diagnosis, FailureClass
from rljob_memory.diagnosis.diagnose import Explanation, FiredRule, diagnose, diagnosed, diagnosis_statuses, explain
from rljob_memory.diagnosis.ledger import Ledger, ledger_of
from rljob_memory.diagnosis.ledger_entries import LedgerEntry, gpu_entries, host_entries

__all__ = [
    "Diagnosis",
    "Explanation",
    "FailureClass",
    "FiredRule",
    "Ledger",
    "LedgerEntry",
    "diagnose",
    "diagnosed",
    "diagnosis_statuses",
    "explain",
    "gpu_entries",
    "host_entries",
    "ledger_of",
]
