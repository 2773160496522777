"""Runs Ray's worker with the environment of a role: as a fork of the role's server, or else in this process.

The raylet runs this program in place of Ray's setup_worker.py (ray._private.workers), whose import of Ray takes a
second. It recognizes the program by its name. Only the standard library is imported here, since each process waits for
that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

DIRECTORY_VARIABLE = "RLJOB_WARM_START"
"""Directory with the sockets of the servers, one for each role. Empty: no process is forked."""
ROLE_VARIABLE = "RLJOB_ROLE_TO_FORK"
"""Environment variable of a role's process that names the server to ask."""
READY, FORKED = b"ready\n", b"forked\n"
LENGTH_BYTES = 4
"""Size of the big-endian length before a request."""
_READY_SECONDS = 120.0
"""Limit for the rest of the server's imports, on a busy machine. It exits if they fail; this is for one that hangs."""


def main() -> None:
    context, language, worker = _parse(sys.argv[1:])
    if language != "PYTHON" or set(context) - {"env_vars", "py_executable"} or not worker:
        _run_rays_own()
    environment = {**os.environ, **context.get("env_vars", {})}
    directory, role = os.environ.get(DIRECTORY_VARIABLE), environment.pop(ROLE_VARIABLE, None)
    if directory and role and (connection := _connect(os.path.join(directory, role))):
        _ask(connection, worker, environment)
    python = context.get("py_executable", sys.executable)
    os.execve(python, [python, *worker], environment)


def _parse(arguments: list[str]) -> tuple[dict[str, Any], str, list[str]]:
    """The runtime environment without empty values, the language, and the command of the worker."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)  # as in Ray's program
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language", default="")
    given, rest = parser.parse_known_args(arguments)
    context = json.loads(given.serialized_runtime_env_context or "{}")
    return {name: value for name, value in context.items() if value}, given.language, rest


def _run_rays_own() -> None:
    """Continue with Ray's program."""
    os.execv(sys.executable, [sys.executable, "-m", "ray._private.workers.setup_worker", *sys.argv[1:]])


def _connect(path: str) -> socket.socket | None:
    """A connection to a server that is ready; None without."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_READY_SECONDS)
    with suppress(OSError):
        connection.connect(path)
        if connection.recv(len(READY)) == READY:
            connection.settimeout(None)
            return connection
    connection.close()
    return None


def _ask(connection: socket.socket, worker: list[str], environment: dict[str, str]) -> None:
    """Have `worker` run in a fork, and exit as it does. Returns if the server declines.

    The fork is killed if this process ends. It has another process id, which it reports to the raylet itself.
    """
    request = json.dumps(
        {
            "worker": worker,
            "environment": environment,
            "directory": os.getcwd(),
            "client": os.getpid(),
            "blocked_signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        }
    ).encode()
    try:
        # The descriptors travel with the first byte.
        socket.send_fds(connection, [len(request).to_bytes(LENGTH_BYTES, "big")], [0, 1, 2])
        connection.sendall(request)
        if connection.recv(len(FORKED)) != FORKED:
            return
    except OSError:
        return
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    code = 0
    with suppress(OSError, ValueError):
        code = int(connection.recv(16) or -signal.SIGKILL)  # no status: the server was killed, and its forks with it
    _exit_as(code)


def _exit_as(code: int) -> None:
    """Exit with `code`; if it is negative, by that signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
