"""From a diagnosis to one change of the memory plan: which change, what it takes, what it frees; or giving up."""

from rljob_memory.recovery.decide import decide, prevent
from rljob_memory.recovery.diagnosed import diagnosed, diagnosis_status
from rljob_memory.recovery.facts import facts_of
from rljob_memory.recovery.history import History, adjustments_left_standing, history_of, with_change
from rljob_memory.recovery.latitude import GiveUp, GiveUpReason, Latitude, Remedy
from rljob_memory.recovery.observed import observed, role_that_shows

__all__ = [
    "GiveUp",
    "GiveUpReason",
    "History",
    "Latitude",
    "Remedy",
    "adjustments_left_standing",
    "decide",
    "diagnosed",
    "diagnosis_status",
    "facts_of",
    "history_of",
    "observed",
    "prevent",
    "role_that_shows",
    "with_change",
]
