"""Starts the servers that fork role processes."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rljob_api.status import Role
from rljob_trainer.hardware import Device, this_machine
from rljob_trainer.roles.warm.server import SERVER_ENVIRONMENT
from rljob_trainer.roles.warm.setup_worker import DIRECTORY_VARIABLE
from rljob_trainer.rollout.config import engine_environment

_SERVE = "import json, sys; from rljob_trainer.roles.warm.server import main; main(*map(json.loads, sys.argv[1:]))"
_WAITING_CLIENTS = 64


class WarmStart:
    """Servers that belong to this process. They end with it, as do their forks."""

    def __init__(self, roles: Sequence[Role], device: Device, variables: Mapping[str, str]) -> None:
        """Start a server for each role, without waiting for it. `variables`: the environment that role processes will
        have, apart from the variables of their role. Call this in the main thread: the servers end with the thread.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="rljob-warm-"))  # only this user can enter it
        with ExitStack() as stack:
            log = stack.enter_context((self.directory / "servers.log").open("ab"))
            sockets = {role: stack.enter_context(self._listening(role)).fileno() for role in roles}
            own = {role: engine_environment(device) if role == "rollout" else {} for role in roles}
            capability = this_machine().gpu_capability if device == "cuda" else None
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, *map(json.dumps, (sockets, own, capability, os.getpid()))],
                pass_fds=list(sockets.values()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run
                env={**variables, **SERVER_ENVIRONMENT},
            )
        atexit.register(self.end)

    def _listening(self, role: Role) -> socket.socket:
        path, listener = self.directory / role, socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_WAITING_CLIENTS)
        return listener

    def end(self) -> None:
        """Kill the servers and their forks. Called when this process exits."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def start_warm(roles: Sequence[Role], device: Device) -> None:
    """Start the servers, and have the workers of a Ray that this process starts later use them.

    Does nothing if the variable is set: by an earlier attempt, or by a test, which shares servers or uses none.
    """
    if DIRECTORY_VARIABLE not in os.environ:
        os.environ[DIRECTORY_VARIABLE] = str(WarmStart(roles, device, os.environ).directory)
