"""Processes that the kernel's OOM killer has ended: a lost process is then a failure of host memory."""

from __future__ import annotations

from collections.abc import Callable

from rljob_client.errors import RunError
from rljob_trainer.errors import HostOutOfMemory, WorkerLost


class KernelKills:
    """Kills of one attempt that no failure has been attributed to yet.

    Counting begins before the first process of the attempt starts. A process may be killed at any moment, also while it
    waits, and its loss is noticed only by the next call.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        """`count`: processes that the kernel has OOM-killed, on all machines with roles. It never falls."""
        self._count = count
        self._attributed = count()

    @property
    def any_new(self) -> bool:
        return self._count() > self._attributed

    def explain(self, failure: WorkerLost) -> RunError:
        """The lost process as a failure of host memory, if the kernel has killed one since the last failure."""
        before, self._attributed = self._attributed, self._count()
        if self._attributed <= before:
            return failure
        killed = HostOutOfMemory(
            f"{failure}: the kernel killed it, since the container reached its memory limit (OOMKilled)"
        )
        killed.actor = failure.actor
        return killed
