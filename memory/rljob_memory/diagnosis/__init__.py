"""From what was seen around an out-of-memory failure to its cause: class, confidence, numbers, sentence, advice."""

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnose import diagnose
from rljob_memory.diagnosis.diagnosis import Diagnosis

__all__ = ["Diagnosis", "FailureClass", "diagnose"]
