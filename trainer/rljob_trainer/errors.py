"""Failures of a run that a user can act on, in addition to those of `rljob_client.errors`."""

from __future__ import annotations

from typing import ClassVar

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_failure import FailureKind
from rljob_client.errors import RunError


class WorkerLost(RunError):
    """A policy rank or a rollout engine died, or Ray did not come up."""

    exit_code = ExitCode.WORKER_LOST

    place_lost: bool = False
    """True if the process was lost with its pod."""


class PhaseDeadlineExceeded(WorkerLost):
    """A policy rank or a rollout engine did not finish a phase in time: it hangs."""


class OutOfMemory(RunError):
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
