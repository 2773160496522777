"""Starts the servers that fork role processes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from rljob_api.status import Role
from rljob_trainer.roles.warm.server import SERVER_ENVIRONMENT
from rljob_trainer.roles.warm.setup_worker import DIRECTORY_VARIABLE

_SERVE = "import sys; from rljob_trainer.roles.warm.server import main; main(sys.argv[1], *map(int, sys.argv[2:]))"
_WAITING_CLIENTS = 64


class WarmStart:
    """Servers that belong to this process. They end with it, as do their forks."""

    def __init__(self, environments: Mapping[Role, Mapping[str, str]]) -> None:
        """Start a server for each role, without waiting for it. `environments`: the variables of its processes that
        are read during the imports. Call this in the main thread: the servers end with the thread that started them.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="rljob-warm-"))  # only this user can enter it
        processes = [self._start(role, environment) for role, environment in environments.items()]
        self.end = weakref.finalize(self, _end, processes, self.directory)
        """Kill the servers and their forks. Also called when this process exits."""

    def _start(self, role: Role, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        path = self.directory / role
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
                env={**os.environ, **environment, **SERVER_ENVIRONMENT},
            )


def start_warm(environments: Mapping[Role, Mapping[str, str]]) -> WarmStart | None:
    """Start the servers, and have Ray's workers that this process starts use them. None if the variable is set: a
    test shares servers between runs, or has disabled them.
    """
    if DIRECTORY_VARIABLE in os.environ:
        return None
    started = WarmStart(environments)
    os.environ[DIRECTORY_VARIABLE] = str(started.directory)
    return started


def _end(processes: Iterable[subprocess.Popen[bytes]], directory: Path) -> None:
    if os.environ.get(DIRECTORY_VARIABLE) == str(directory):
        del os.environ[DIRECTORY_VARIABLE]
    for process in processes:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)
