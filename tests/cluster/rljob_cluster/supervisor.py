"""Supervision of programs, as by a machine's init process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

RESTART_SECONDS = 1.0
"""Minimum seconds between two starts of a program."""


@dataclass(slots=True)
class Supervised:
    command: list[str]
    pid: int | None
    started: float


@dataclass(slots=True)
class Supervisor:
    """Starts programs, each with its own log, restarts programs that exit, and reaps orphaned processes."""

    logs: Path
    search_path: str
    _programs: dict[str, Supervised] = field(default_factory=dict, init=False)

    def ensure(self, name: str, command: list[str]) -> None:
        """Start the program unless it is supervised already."""
        if name not in self._programs:
            self._programs[name] = Supervised(command, self._spawn(name, command), time.monotonic())

    def restart_ended(self) -> None:
        """Reap processes that exited, and restart programs that are due. Does not wait."""
        for pid, status in _ended():
            for name, program in self._programs.items():
                if program.pid == pid:
                    program.pid = None
                    print(f"{name} (process {pid}) exited with code {os.waitstatus_to_exitcode(status)}", flush=True)
        for name, program in self._programs.items():
            if program.pid is None and time.monotonic() - program.started >= RESTART_SECONDS:
                program.pid, program.started = self._spawn(name, program.command), time.monotonic()

    def _spawn(self, name: str, command: list[str]) -> int:
        log = os.open(self.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            output = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
            environment = {"PATH": self.search_path, "HOME": "/root"}
            return os.posix_spawn(command[0], command, environment, file_actions=output, setsid=True)
        finally:
            os.close(log)


def _ended() -> list[tuple[int, int]]:
    """Processes that exited since the last call, with their wait status."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))
