"""The termination message of a trainer: one JSON object of at most 4,096 bytes in /dev/termination-log."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError

from rljob_api.api_model import ApiModel, Count
from rljob_api.bounds import storable, within_bounds
from rljob_api.step_report import Evidence

MAX_TERMINATION_MESSAGE_BYTES = 4096
"""Maximum size of a termination message; the kubelet drops the rest."""

_LONGEST_MESSAGE = 1024
_INT64_CHARACTERS = 20


def _shortened(text: object) -> object:
    text = storable(text)
    if isinstance(text, str) and len(text) > _LONGEST_MESSAGE:
        return text[: _LONGEST_MESSAGE - 1] + "…"
    return text


class TerminationMessage(ApiModel):
    """Termination of a process of the job, as reported to the operator."""

    exit_code: int = Field(ge=0, le=255)
    """Exit code, as in the table of exit codes."""

    message: Annotated[str, BeforeValidator(_shortened)] = Field(max_length=_LONGEST_MESSAGE)
    """Explanation of the termination, and what to do. Longer text is truncated."""

    step: Count | None = None
    """Number of committed steps."""

    evidence: Evidence | None = None
    """Observations about an out-of-memory failure."""

    def to_json(self) -> bytes:
        """JSON of at most 4,096 bytes. The samples in the evidence are omitted as needed, then its message is
        truncated, then the evidence is omitted."""
        message = self
        while len(encoded := message.model_dump_json(by_alias=True, exclude_none=True).encode()) > (
            MAX_TERMINATION_MESSAGE_BYTES
        ):
            message = message._truncated(len(encoded) - MAX_TERMINATION_MESSAGE_BYTES)
        return encoded

    def _truncated(self, excess_bytes: int) -> TerminationMessage:
        if self.evidence is None:
            return self.model_copy(update={"message": self.message[: len(self.message) // 2]})
        if self.evidence.failure is not None and self.evidence.failure.samples:
            failure = self.evidence.failure.model_copy(update={"samples": []})
            return self.model_copy(update={"evidence": self.evidence.model_copy(update={"failure": failure})})
        text = self.evidence.message
        kept = text[: max(len(text) - excess_bytes, 0)]
        evidence = self.evidence.model_copy(update={"message": kept}) if text else None
        return self.model_copy(update={"evidence": evidence})


def read_termination_message(text: str) -> TerminationMessage | None:
    """The message in a container's termination log; None if `text` is not a message. Evidence beyond the bounds of the
    API is clipped to them."""
    try:
        found = json.loads(text, parse_int=_int64)
        try:
            return TerminationMessage.model_validate_json(text)
        except ValidationError:
            if not isinstance(found, dict):
                return None
            evidence = within_bounds(found.get("evidence"), Evidence)
            return TerminationMessage.model_validate_json(json.dumps(found | {"evidence": evidence}))
    except (ValueError, RecursionError):
        return None


def _int64(digits: str) -> int:
    """An integer that the API server accepts in a status, to which the numbers of a user's program are copied."""
    if len(digits) > _INT64_CHARACTERS or not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError("expected an integer of at most 64 bits")
    return number
