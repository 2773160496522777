"""A Kubernetes Event for the user, and the object that it is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Subject:
    """The object that an Event is about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class EventNote:
    """A Kubernetes Event. Equal notes are counted in one Event, not repeated."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    """At most 1,024 characters."""
