"""A cause that fits a failure, and the part of the failure that it explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Weight(IntEnum):
    """The part of the failure that a cause explains."""

    FAINT = 1
    """It may play a part."""
    POSSIBLE = 2
    """Nothing speaks against it, and little for it."""
    LIKELY = 3
    """The work of the process, or the words of the error, point to it."""
    STRONG = 4
    """It explains all of the missing memory."""
    CERTAIN = 5
    """The numbers or the words leave no other reading."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause that fits a failure."""

    weight: Weight

    message: str
    """Message about the cause, with its numbers."""

    excess_bytes: int = 0
    """Observed memory beyond what is expected; of two causes of the same weight, the larger one comes first."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    """Bytes and counts behind it, by name."""
