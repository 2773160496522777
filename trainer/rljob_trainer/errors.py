"""Failures that a person can act on, each with the exit code of the process."""

from __future__ import annotations

from typing import ClassVar, Self

from rljob_api.exit_codes import ExitCode
from rljob_api.step_report import Evidence
from rljob_api.storable_text import storable
from rljob_memory.evidence.failure import Failure, FailureKind


class TrainerError(Exception):
    """Base of the failures below. The message states what was expected, what was found, and what to do.

    It can be stored and printed, whatever it quotes.
    """

    def __init__(self, *message: object) -> None:
        super().__init__(*storable(message))

    exit_code: ClassVar[ExitCode] = ExitCode.ERROR

    actor: str | None = None
    """The process in which it happened, such as policy-1. None: the controller."""

    out_of_memory: Failure | None = None
    """The failure of memory in that process, from its exception. None if it left no exception."""

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


class BadInput(TrainerError):
    """The model, the task or its reward function cannot be used as given."""

    exit_code = ExitCode.BAD_INPUT

    field: tuple[str | int, ...] | None = None
    """Path of the field of the manifest that it concerns; None: the caller knows it."""

    def at(self, *field: str | int) -> Self:
        """This failure, attributed to a field."""
        self.field = field
        return self


class OutputUnavailable(TrainerError):
    """The output directory is full, unwritable, locked by another run, or belongs to another job."""

    exit_code = ExitCode.OUTPUT_UNAVAILABLE


class WorkerLost(TrainerError):
    """A policy rank or a rollout engine died, or Ray did not come up."""

    exit_code = ExitCode.WORKER_LOST

    place_lost: bool = False
    """True if the process was lost with its pod."""


class PhaseDeadlineExceeded(WorkerLost):
    """A policy rank or a rollout engine did not finish a phase in time: it hangs."""


class OutOfMemory(TrainerError):
    """Base of the failures of memory."""

    failure_kind: ClassVar[FailureKind] = FailureKind.NO_MESSAGE
    """The kind of failure if its process left no exception."""


class DeviceOutOfMemory(OutOfMemory):
    """A GPU ran out of memory."""

    exit_code = ExitCode.DEVICE_OUT_OF_MEMORY


class SharedMemoryExhausted(OutOfMemory):
    """/dev/shm, where Ray keeps its object store, is too small."""

    exit_code = ExitCode.SHARED_MEMORY_EXHAUSTED
    failure_kind = FailureKind.SHARED_MEMORY


class HostOutOfMemory(OutOfMemory):
    """The machine, or the container, ran out of memory."""

    exit_code = ExitCode.HOST_OUT_OF_MEMORY
    failure_kind = FailureKind.HOST
