"""Decides when a worker exits, from what it observes. Pure: the time is a parameter."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.exit_codes import ExitCode

HEAD_GONE_SECONDS = 15.0
"""A head that does not answer for this long counts as gone. Shorter interruptions of the network are tolerated."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One observation of a worker."""

    head: bool
    """The Ray head accepts connections."""

    raylet: bool
    """Ray in this pod accepts connections."""

    controller_ended: bool
    """The controller has announced its exit."""

    to_restart: bool = False
    """The controller has announced a restart of the pods in place."""

    oom_kills: int = 0
    """Processes of this container that the kernel has OOM-killed."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The result of a worker."""

    exit_code: ExitCode

    message: str
    """For people."""


class HeadWatch:
    """Watches the Ray head of a worker that has joined it."""

    def __init__(self, head: str, now: float) -> None:
        """`head`: its address for messages. `now`: seconds, on a monotonic clock."""
        self._head = head
        self._last_answer = now

    def check(self, seen: Observed, now: float) -> WorkerExit | None:
        """The result of the worker, if it is to exit now; otherwise None."""
        if seen.head:
            self._last_answer = now
            # A raylet exits by itself after its head. If the head still answers, the exit is a failure.
            return None if seen.raylet or seen.controller_ended else _without_ray(seen.oom_kills)
        if seen.to_restart:  # only after the head is gone: it must not be joined again
            return WorkerExit(ExitCode.RESTART_IN_PLACE, "the pods are restarted in place under a changed memory plan")
        if seen.controller_ended:
            return WorkerExit(ExitCode.COMPLETE, "the controller has exited; this worker exits too")
        silence = now - self._last_answer
        if silence >= HEAD_GONE_SECONDS:
            return WorkerExit(
                ExitCode.WORKER_LOST,
                f"the controller is gone: {self._head} has not answered for {silence:.0f} s; "
                "check the termination message of its pod",
            )
        return None


def _without_ray(kills: int) -> WorkerExit:
    """The kernel may have killed Ray itself, which nothing else can report."""
    if not kills:
        return WorkerExit(ExitCode.WORKER_LOST, "Ray ended in this pod")
    killed = f"the kernel killed {kills} of this container's processes, since it reached its memory limit (OOMKilled)"
    return WorkerExit(ExitCode.HOST_OUT_OF_MEMORY, f"Ray ended in this pod: {killed}")
