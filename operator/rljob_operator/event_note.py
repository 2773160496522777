"""A Kubernetes Event for the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EventNote:
    """A Kubernetes Event about the job. Equal notes are counted in one Event, not repeated."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    """At most 1,024 characters."""
