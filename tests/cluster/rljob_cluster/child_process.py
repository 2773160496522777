"""A program that never outlives this process."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from rljob_cluster.errors import ClusterError

STOP_SECONDS = 10


@dataclass(slots=True)
class ChildProcess:
    """A program and its log. The kernel kills the program when the thread that started it exits for any reason."""

    command: list[str]
    log: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return Path(self.command[0]).name

    def start(self) -> None:
        """Start the program. Raises ClusterError if it is running already."""
        if self._process and self._process.poll() is None:
            raise ClusterError(f"{self.name} is already running as process {self._process.pid}: stop it first")
        with self.log.open("ab") as log:
            command = ["setpriv", "--pdeathsig", "KILL", "--", *self.command]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the program has not exited after 10 s."""
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def check_running(self) -> None:
        """Raises ClusterError with the last lines of the log if the program has exited."""
        if self._process is None or self._process.poll() is None:
            return
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
        raise ClusterError(
            f"{self.name} exited with code {self._process.returncode}; last lines of {self.log}:\n{tail}"
        )
