"""Calls that the policy ranks do together. If one fails, all leave the call, and can form their group anew."""

from __future__ import annotations

from typing import Any

from rljob_client.errors import RunError
from rljob_trainer.errors import DeviceOutOfMemory
from rljob_trainer.roles.calls import all_returned, wait_for
from rljob_trainer.roles.role_processes import RoleProcesses
from rljob_trainer.roles.time_limit import time_limit

_LEAVE_SECONDS = 30.0
"""For all ranks to leave a call after one has left the group. They leave at their next collective operation."""
_REJOIN_SECONDS = 120.0


class PolicyRanks:
    """The process group of the policy ranks, as the controller sees it."""

    def __init__(self, processes: RoleProcesses) -> None:
        self._processes = processes
        self.scattered = False
        """The ranks have left their group, and `rejoin` brings them together. Their processes are well."""
        self._in_update = False

    def connect(self) -> None:
        """Form the first group of new processes."""
        self.scattered = False
        host, port = self._rendezvous()
        wait_for(self._processes.call("connect", host, port), "joining the process group")

    def call(self, method: str, *arguments: Any, doing: str) -> dict[str, Any]:
        """Call a method of all ranks, which may wait for one another in it.

        If one runs out of memory, the others leave the call before the failure is raised. If they do not in time, or
        after any other failure, the processes are unusable and `scattered` is False.
        """
        calls = self._processes.call(method, *arguments)
        try:
            return wait_for(calls, doing)
        except DeviceOutOfMemory:
            self.scattered = len(self._processes) > 1 and all_returned(calls, within_seconds=_LEAVE_SECONDS)
            self._in_update = method == "update"
            raise

    @property
    def usable(self) -> bool:
        """After a failed call: True if no rank still waits for another."""
        return self.scattered or len(self._processes) == 1

    def can_undo_update(self) -> bool:
        """True if all ranks can repeat the failed update with the same result."""
        if not self.usable:
            return False
        try:
            return all(wait_for(self._processes.call("can_undo_update"), "checking the failed update").values())
        except RunError:
            return False

    def rejoin(self) -> None:
        """Bring the ranks to the state before the failed call, in a new group. Raises `RunError` if that fails."""
        with time_limit(_REJOIN_SECONDS):
            host, port = self._rendezvous()
            wait_for(self._processes.call("rejoin", host, port, self._in_update), "joining the new process group")
        self.scattered = False

    def _rendezvous(self) -> tuple[str, int]:
        [(host, port)] = wait_for(self._processes.call_first("rendezvous"), "starting").values()
        return host, port
