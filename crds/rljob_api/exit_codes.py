"""Exit codes of a trainer: part of its contract with the operator and other supervisors."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """Exit code of a trainer process.

    RLJob's own codes are in the block 80-89, which the common conventions leave free (sysexits ends at 78, shells start
    at 126).
    """

    meaning: str
    """Description for log messages and documentation."""

    def __new__(cls, value: int, meaning: str = "") -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        assert meaning, "each member has one; a value alone names a member"
        member.meaning = meaning
        return member

    COMPLETE = 0, "all steps are committed"
    ERROR = 1, "an unexpected error; see the log"
    INVALID_MANIFEST = 2, "the manifest or the command line is invalid; nothing was started"
    DEVICE_OUT_OF_MEMORY = 80, "a GPU ran out of memory; a change of the memory plan is expected to help"
    HOST_OUT_OF_MEMORY = 81, "the container or the machine ran out of host memory"
    SHARED_MEMORY_EXHAUSTED = 82, "/dev/shm is full"
    WORKER_LOST = 83, "a policy rank or a rollout engine died or hung, or Ray did not start"
    BAD_INPUT = 84, "the model, the task or its reward function cannot be used"
    OUTPUT_UNAVAILABLE = 85, "the output directory is full, not writable, or in use by another run"
    RESTART_IN_PLACE = 86, "requests a restart of all containers of the pod, for the next attempt"
    INTERRUPTED = 130, "stopped by SIGINT; the same command resumes the run"
    TERMINATED = 143, "stopped by SIGTERM; the same command resumes the run"

    @property
    def retry(self) -> bool:
        """True if a restart can help without a change of the manifest or the inputs."""
        return self not in (ExitCode.COMPLETE, ExitCode.INVALID_MANIFEST, ExitCode.BAD_INPUT)
