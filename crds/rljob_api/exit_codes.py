"""Exit codes of a trainer: part of its contract with the operator and other supervisors."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a trainer process.

    RLJob's own codes are in the block 80-89, which the common conventions leave free (sysexits ends at 78, shells start
    at 126).
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
        """Description for log messages and documentation."""
        return _MEANING[self]

    @property
    def retry(self) -> bool:
        """True if a restart can help without a change of the manifest or the inputs."""
        return self not in (ExitCode.COMPLETE, ExitCode.INVALID_MANIFEST, ExitCode.BAD_INPUT)


_MEANING = {
    ExitCode.COMPLETE: "all steps are committed",
    ExitCode.ERROR: "an unexpected error; see the log",
    ExitCode.INVALID_MANIFEST: "the manifest or the command line is invalid; nothing was started",
    ExitCode.DEVICE_OUT_OF_MEMORY: "a GPU ran out of memory; a change of the memory plan is expected to help",
    ExitCode.HOST_OUT_OF_MEMORY: "the container or the machine ran out of host memory",
    ExitCode.SHARED_MEMORY_EXHAUSTED: "/dev/shm is full",
    ExitCode.WORKER_LOST: "a policy rank or a rollout engine died or hung, or Ray did not start",
    ExitCode.BAD_INPUT: "the model, the task or its reward function cannot be used",
    ExitCode.OUTPUT_UNAVAILABLE: "the output directory is full, not writable, or in use by another run",
    ExitCode.RESTART_IN_PLACE: "requests a restart of all containers of the pod, for the next attempt",
    ExitCode.INTERRUPTED: "stopped by SIGINT; the same command resumes the run",
    ExitCode.TERMINATED: "stopped by SIGTERM; the same command resumes the run",
}
