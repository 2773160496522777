"""Diagnosis of an out-of-memory failure: class of the cause, confidence, numbers, message, advice."""

from rljob_memory.diagnosis.balance import Balance
from rljob_memory.diagnosis.balance_entries import BalanceEntry, gpu_entries, host_entries
from rljob_memory.diagnosis.causes.finding import Finding, Weight
from rljob_memory.diagnosis.causes.table import found_causes
from rljob_memory.diagnosis.classes import Diagnosis, FailureClass
from rljob_memory.diagnosis.diagnose import diagnose, diagnosed, diagnosis_statuses

__all__ = [
    "Balance",
    "BalanceEntry",
    "Diagnosis",
    "FailureClass",
    "Finding",
    "Weight",
    "diagnose",
    "diagnosed",
    "diagnosis_statuses",
    "found_causes",
    "gpu_entries",
    "host_entries",
]
