"""What a trainer writes to /dev/termination-log as it ends: one JSON object of at most 4,096 bytes."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BeforeValidator, Field

from rljob_api.api_model import ApiModel
from rljob_api.step_report import Evidence

MAX_TERMINATION_MESSAGE_BYTES = 4096
"""What the kubelet keeps of it."""

_LONGEST_MESSAGE = 1024
_INT64_CHARACTERS = 20


def _shortened(text: object) -> object:
    if isinstance(text, str) and len(text) > _LONGEST_MESSAGE:
        return text[: _LONGEST_MESSAGE - 1] + "…"
    return text


class TerminationMessage(ApiModel):
    """How a process of the job ended, for whoever decides what happens next."""

    exit_code: int = Field(ge=0, le=255)
    """As in the table of exit codes."""

    message: Annotated[str, BeforeValidator(_shortened)] = Field(max_length=_LONGEST_MESSAGE)
    """What happened and what to do, for people. A longer one is cut."""

    step: int | None = Field(default=None, ge=0)
    """Steps committed."""

    evidence: Evidence | None = None
    """What was seen around an out-of-memory failure."""

    def to_json(self) -> bytes:
        """At most 4,096 bytes: the evidence's message is cut as far as needed, then the evidence is left out."""
        message = self
        while len(encoded := message.model_dump_json(by_alias=True, exclude_none=True).encode()) > (
            MAX_TERMINATION_MESSAGE_BYTES
        ):
            message = message._smaller(len(encoded) - MAX_TERMINATION_MESSAGE_BYTES)
        return encoded

    def _smaller(self, excess_bytes: int) -> TerminationMessage:
        if self.evidence is None:
            return self.model_copy(update={"message": self.message[: len(self.message) // 2]})
        text = self.evidence.message
        kept = text[: max(len(text) - excess_bytes, 0)]
        evidence = self.evidence.model_copy(update={"message": kept}) if text else None
        return self.model_copy(update={"evidence": evidence})


def read_termination_message(text: str) -> TerminationMessage | None:
    """The message in what a container left behind; None where it is something else, or damaged."""
    try:
        json.loads(text, parse_int=_int64)
        return TerminationMessage.model_validate_json(text)
    except (ValueError, RecursionError):
        return None


def _int64(digits: str) -> int:
    """As large as the API server takes: what a user's program writes here ends up in a status."""
    if len(digits) > _INT64_CHARACTERS or not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError("expected an integer of at most 64 bits")
    return number
