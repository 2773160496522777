"""Failures that a person can act on, each with the exit code of the process."""

from __future__ import annotations

from typing import ClassVar, Self

from rljob_api.bounds import storable
from rljob_api.exit_codes import ExitCode
from rljob_api.memory_failure import MemoryFailure
from rljob_api.step_report import Evidence


class RunError(Exception):
    """Base of the failures below. The message states what was expected, what was found, and what to do.

    It can be stored and printed, whatever it quotes.
    """

    def __init__(self, *message: object) -> None:
        super().__init__(*storable(message))

    exit_code: ClassVar[ExitCode] = ExitCode.ERROR

    actor: str | None = None
    """The process in which it happened, such as policy-1. None: the controller."""

    out_of_memory: MemoryFailure | None = None
    """The account that the process gives of its failure. None if it could give none."""

    raised: str | None = None
    """Type of the ordinary Python exception in that process which this failure reports: the same work would raise it
    again. None for other failures."""

    given_up: bool = False
    """True if recovery gave up, and the message lists the changes that were tried and those that a person can make."""

    evidence: Evidence | None = None
    """Evidence of an out-of-memory failure; None for other failures, and until it was gathered."""

    def of(self, actor: str) -> Self:
        """This failure, attributed to `actor`."""
        self.actor = actor
        return self


class BadInput(RunError):
    """The model, the task or its reward function cannot be used as given."""

    exit_code = ExitCode.BAD_INPUT

    field: tuple[str | int, ...] | None = None
    """Path of the field of the manifest that it concerns; None: the caller knows it."""

    def at(self, *field: str | int) -> Self:
        """This failure, attributed to a field."""
        self.field = field
        return self


class OutputUnavailable(RunError):
    """The output directory is full, unwritable, locked by another run, or belongs to another job."""

    exit_code = ExitCode.OUTPUT_UNAVAILABLE
