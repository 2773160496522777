"""Starts the servers that fork role processes."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from rljob_api.status import Role
from rljob_trainer.hardware import Device
from rljob_trainer.roles.warm.server import SERVER_ENVIRONMENT
from rljob_trainer.roles.warm.setup_worker import DIRECTORY_VARIABLE
from rljob_trainer.rollout.config import engine_environment

_SERVE = "import sys; from rljob_trainer.roles.warm.server import main; main(sys.argv[1], *map(int, sys.argv[2:]))"
_WAITING_CLIENTS = 64


class WarmStart:
    """Servers that belong to this process. They end with it, as do their forks."""

    def __init__(self, roles: Iterable[Role], device: Device, variables: Mapping[str, str]) -> None:
        """Start a server for each role, without waiting for it. `variables`: the environment that role processes will
        have, apart from the variables of their role. Call this in the main thread: the servers end with the thread.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="rljob-warm-"))  # only this user can enter it
        self.processes = [self._start(role, device, variables) for role in roles]
        atexit.register(self.end)

    def _start(self, role: Role, device: Device, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        path = self.directory / role
        role_environment = engine_environment(device) if role == "rollout" else {}
        with socket.socket(socket.AF_UNIX) as listener, path.with_suffix(".log").open("ab") as log:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_WAITING_CLIENTS)
            return subprocess.Popen(
                [sys.executable, "-c", _SERVE, role, str(listener.fileno()), str(os.getpid())],
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run
                env={**variables, **role_environment, **SERVER_ENVIRONMENT},
            )

    def end(self) -> None:
        """Kill the servers and their forks. Called when this process exits."""
        for process in self.processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def start_warm(roles: Iterable[Role], device: Device) -> None:
    """Start the servers, and have the workers of a Ray that this process starts later use them.

    Does nothing if the variable is set: by an earlier attempt, or by a test, which shares servers or uses none.
    """
    if DIRECTORY_VARIABLE not in os.environ:
        os.environ[DIRECTORY_VARIABLE] = str(WarmStart(roles, device, os.environ).directory)
