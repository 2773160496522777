"""When a worker's life is over, decided from what it sees. Pure: the time is given."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.exit_codes import ExitCode

HEAD_GONE_SECONDS = 15.0
"""How long the head may not answer before it counts as gone: a pause of the network is no end of a job."""


@dataclass(frozen=True, slots=True)
class Seen:
    """`head`, `raylet`: whether the head and this pod's own Ray accept connections. `controller_ended`: whether the
    controller has said that its end is in order. `to_restart`: whether it has said that the pods start anew."""

    head: bool
    raylet: bool
    controller_ended: bool
    to_restart: bool = False
    kills: int = 0
    """Processes of this container that the kernel killed for their memory."""


@dataclass(frozen=True, slots=True)
class Ending:
    exit_code: ExitCode
    sentence: str


class HeadWatch:
    def __init__(self, head: str, now: float) -> None:
        """`head`: as people know it. `now`: seconds, when the worker joined it."""
        self._head = head
        self._last_answer = now

    def look(self, seen: Seen, now: float) -> Ending | None:
        """How the worker ends now; None where it goes on."""
        if seen.head:
            self._last_answer = now
            # Without a head, a raylet ends by itself: only with one is its end the failure.
            return None if seen.raylet or seen.controller_ended else _without_ray(seen.kills)
        if seen.to_restart:  # not before the head is gone: it must not be joined again
            return Ending(ExitCode.RESTART_IN_PLACE, "the pods are restarted in place under a changed memory plan")
        if seen.controller_ended:
            return Ending(ExitCode.COMPLETE, "the controller has ended, and so does this worker")
        silence = now - self._last_answer
        if silence >= HEAD_GONE_SECONDS:
            return Ending(
                ExitCode.WORKER_LOST,
                f"the controller is gone: {self._head} has not answered for {silence:.0f} s. Look at how its pod ended",
            )
        return None


def _without_ray(kills: int) -> Ending:
    """Ray itself may be what the kernel killed: nobody else can report that."""
    if not kills:
        return Ending(ExitCode.WORKER_LOST, "Ray ended in this pod")
    killed = f"the kernel killed {kills} of this container's processes, since it reached its memory limit (OOMKilled)"
    return Ending(ExitCode.HOST_OUT_OF_MEMORY, f"Ray ended in this pod: {killed}")
