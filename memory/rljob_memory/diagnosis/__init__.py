"""Diagnosis of an out-of-memory failure: class of the cause, confidence, numbers, message, advice."""

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnose import diagnose
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.ledger import LedgerEntry, ledger_of
from rljob_memory.diagnosis.reported import diagnosed, diagnosis_statuses

__all__ = [
    "Diagnosis",
    "FailureClass",
    "LedgerEntry",
    "diagnose",
    "diagnosed",
    "diagnosis_statuses",
    "ledger_of",
]
