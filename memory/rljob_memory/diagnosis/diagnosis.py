"""A cause that fits a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_memory.diagnosis.classes import FailureClass


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One cause that fits the evidence."""

    failure_class: FailureClass

    confidence: float
    """Between 0 and 1; above 0.8 only if numbers or an unmistakable message show the cause."""

    message: str
    """The cause as a sentence, with the numbers behind it."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    """Bytes and counts behind it, by name."""

    program_advice: str = ""
    """Options of the program that wrote the log; empty if it is not known, or has none that helps."""

    is_of_rljob: bool = True
    """False if no file is known to be of an RLJob: then its fields are no advice."""

    @property
    def advice(self) -> str:
        """The settings to change: those of the program that wrote the log, else of an RLJob, or of any trainer."""
        general = self.failure_class.advice if self.is_of_rljob else self.failure_class.general_advice
        return self.program_advice or general

    def as_dict(self) -> dict[str, Any]:
        """`class`, `confidence`, `message`, `numbers`, `advice`, as JSON values."""
        return {
            "class": str(self.failure_class),
            "confidence": self.confidence,
            "message": self.message,
            "numbers": dict(self.numbers),
            "advice": self.advice,
        }
