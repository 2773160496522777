"""The exit codes of a trainer: part of the contract with whatever supervises it."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a trainer process ended, and what its supervisor should do about it.

    The block 80–89 is free in the common conventions (sysexits ends at 78, shells start at 126).
    """

    COMPLETE = 0
    ERROR = 1
    INVALID_MANIFEST = 2
    DEVICE_OUT_OF_MEMORY = 80
    HOST_OUT_OF_MEMORY = 81
    SHARED_MEMORY_EXHAUSTED = 82
    WORKER_LOST = 83
    BAD_INPUT = 84
    OUTPUT_UNAVAILABLE = 85
    RESTART_IN_PLACE = 86
    INTERRUPTED = 130
    TERMINATED = 143

    @property
    def meaning(self) -> str:
        """One sentence for people."""
        return _MEANING[self]

    @property
    def retry(self) -> bool:
        """Whether starting the same job again can help without a change by a human."""
        return self not in (ExitCode.COMPLETE, ExitCode.INVALID_MANIFEST, ExitCode.BAD_INPUT)


_MEANING = {
    ExitCode.COMPLETE: "all steps are committed",
    ExitCode.ERROR: "an unexpected error; the log names it",
    ExitCode.INVALID_MANIFEST: "the manifest or the command line is wrong; nothing was started",
    ExitCode.DEVICE_OUT_OF_MEMORY: "a GPU ran out of memory; a changed memory plan is expected to help",
    ExitCode.HOST_OUT_OF_MEMORY: "the machine, or the container, ran out of memory",
    ExitCode.SHARED_MEMORY_EXHAUSTED: "/dev/shm is full",
    ExitCode.WORKER_LOST: "a policy rank or a rollout engine died, or Ray did not come up",
    ExitCode.BAD_INPUT: "the model, the task or its reward function cannot be used as given",
    ExitCode.OUTPUT_UNAVAILABLE: "the output directory is full, unwritable, or in use by another run",
    ExitCode.RESTART_IN_PLACE: "asks for a restart of all containers of the pod, with the new environment",
    ExitCode.INTERRUPTED: "stopped by SIGINT; the same command continues",
    ExitCode.TERMINATED: "stopped by SIGTERM; the same command continues",
}
