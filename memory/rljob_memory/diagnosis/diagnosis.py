"""What is said of a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_memory.diagnosis.classes import FailureClass


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One cause that fits. `confidence`: 0 to 1; beyond 0.8 only where numbers or an unmistakable message say so.

    `message`: for people, with the numbers. `numbers`: bytes and counts behind it, by name.
    """

    failure_class: FailureClass
    confidence: float
    message: str
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def advice(self) -> str:
        """What to change."""
        return self.failure_class.advice

    def as_dict(self) -> dict[str, Any]:
        """`class`, `confidence`, `message`, `numbers`, `advice`, as JSON values."""
        return {
            "class": str(self.failure_class),
            "confidence": self.confidence,
            "message": self.message,
            "numbers": dict(self.numbers),
            "advice": self.advice,
        }
