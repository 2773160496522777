"""The server of one role: imports its libraries, then forks a process for each request of `setup_worker.py`.

A forked process can use neither the threads nor the CUDA context of its parent. If an import has created one of them,
the server exits, and role processes start without it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rljob_trainer.roles.actor import long_imports
from rljob_trainer.roles.warm.setup_worker import DIRECTORY_VARIABLE, FORKED, LENGTH_BYTES, READY

MODULES: Mapping[str, Sequence[str]] = {
    "policy": ("rljob_trainer.roles.policy_actor",),
    "rollout": ("rljob_trainer.roles.rollout_actor", "vllm.entrypoints.llm"),
}
"""By role: the modules to import, with those that they import."""

_IN_FORKS = "ray"
"""When its library is loaded, Ray reads the process's job and raylet from the environment, and never again. vLLM tries
to import it, for executors that are not used here."""

SERVER_ENVIRONMENT = {
    # A pool of threads could not be forked. A fork gets its own number (`_apply`).
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # GNU's OpenMP reads it when it is loaded.
    "OMP_WAIT_POLICY": "PASSIVE",
    # `ray_node` sets it in pods. Output goes through files of Ray's.
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",  # as `ray_driver` sets it
    # As the raylet sets it: the title of a process leaves the place of its environment alone.
    "SPT_NOENV": "1",
}
_OF_ONE_PROCESS = {
    *SERVER_ENVIRONMENT,
    *("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "GLOO_SOCKET_IFNAME"),
    *(DIRECTORY_VARIABLE, "PYTHONBREAKPOINT", "COLUMNS", "PWD", "OLDPWD", "SHLVL", "_"),
}
_OF_ONE_PROCESS_PREFIXES = ("RAY_", "NCCL_", "TORCH_NCCL_")
"""Variables that nothing reads while it is imported. If others differ, the process is not forked."""

_REQUEST_SECONDS = 10.0
_CREDENTIALS = struct.Struct("3i")  # ucred: process, user, group
_PR_SET_PDEATHSIG = 1
_CUDA_NOT_INITIALIZED = 3
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True, slots=True)
class Request:
    """A process to fork."""

    worker: list[str]
    """Path of the program and its arguments."""
    environment: dict[str, str]
    directory: str
    blocked_signals: list[int]
    client: int
    """Process id of `setup_worker.py`."""


def main(role: str, listening: int, parent: int) -> None:
    """Serve `role` until the process `parent` ends. In a fork, run the worker. `listening`: descriptor of the socket,
    at which clients wait during the imports.
    """
    _end_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    listener = socket.socket(fileno=listening)
    os.set_inheritable(listening, False)
    before = dict(os.environ)
    sys.modules[_IN_FORKS] = None  # type: ignore[assignment]
    with long_imports():
        for module in MODULES[role]:
            importlib.import_module(module)
    del sys.modules[_IN_FORKS]
    if obstacle := obstacle_to_forks():
        sys.exit(f"{role} processes start without this server: {obstacle}")
    changed = {name: os.environ[name] for name in differences(os.environ, before) if name in os.environ}
    _Server(listener, before, changed).serve()()


def obstacle_to_forks() -> str | None:
    """A reason not to fork this process; None if there is none."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"an import has started {threads - 1} threads"
    with suppress(OSError):
        found = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(found)) != _CUDA_NOT_INITIALIZED:
            return "an import has initialized CUDA"
    return None


def differences(environment: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    """Names of variables that differ and that imports may read or set."""
    names = {name for name in {*environment, *own} if environment.get(name) != own.get(name)}
    return sorted(
        name for name in names if name not in _OF_ONE_PROCESS and not name.startswith(_OF_ONE_PROCESS_PREFIXES)
    )


class _Server:
    """One thread, which waits for requests, for the end of clients, and for the end of forks."""

    def __init__(self, listener: socket.socket, own: Mapping[str, str], changed: dict[str, str]) -> None:
        """`own`: the environment before the imports. `changed`: the variables that they set."""
        self._listener = listener
        self._own = own
        self._changed = changed
        self._selector = selectors.DefaultSelector()
        self._open: dict[int, tuple[socket.socket, int]] = {}
        """Connection and pidfd of each fork, by process id."""

    def serve(self) -> Callable[[], None]:
        """Serve forever. Returns in each fork, with the worker to run."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while True:
            for key, _ in self._selector.select():
                # The connection may have been closed by an earlier event.
                if key.fd in self._selector.get_map() and (worker := key.data()):
                    return partial(_run, worker)

    def _accept(self) -> Request | None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return None
        with suppress(OSError, ValueError):
            client, user, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if user == os.geteuid():
                connection.settimeout(_REQUEST_SECONDS)
                connection.sendall(READY)  # fails if the client has given up
                request, descriptors = _receive(connection, client)
                try:
                    if differing := differences(request.environment, self._own):
                        print(f"not forked because of {', '.join(differing)}", flush=True)
                    else:
                        return self._fork(connection, request, descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
        connection.close()
        return None

    def _fork(self, connection: socket.socket, request: Request, descriptors: Sequence[int]) -> Request | None:
        """Fork. Returns the request in the fork."""
        server = os.getpid()
        process = os.fork()
        if process == 0:
            try:
                self._become(request, descriptors, connection, server)
            except BaseException:
                traceback.print_exc()
                os._exit(1)  # it must not serve
            return request
        connection.settimeout(None)
        watched = os.pidfd_open(process)
        self._open[process] = connection, watched
        # A client sends nothing more: its connection is readable once it has ended.
        self._selector.register(connection, selectors.EVENT_READ, partial(self._kill, process))
        self._selector.register(watched, selectors.EVENT_READ, partial(self._reap, process))
        with suppress(OSError):
            connection.sendall(FORKED)
        return None

    def _kill(self, process: int) -> None:
        self._selector.unregister(self._open[process][0])
        os.kill(process, signal.SIGKILL)  # not reaped yet

    def _reap(self, process: int) -> None:
        """Send the exit code of a fork to its client."""
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        connection, watched = self._open.pop(process)
        for file in (connection, watched):
            with suppress(KeyError):
                self._selector.unregister(file)
        with suppress(OSError):
            connection.sendall(str(code).encode())
        connection.close()
        os.close(watched)

    def _become(self, request: Request, descriptors: Sequence[int], connection: socket.socket, server: int) -> None:
        """Make the fork the process that the client would have become."""
        os.setsid()
        _end_with(server)
        self._selector.close()
        self._listener.close()
        connection.close()
        for other, watched in self._open.values():
            other.close()
            os.close(watched)
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
        _take_over(request.client)
        os.chdir(request.directory)
        signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked_signals)
        os.environ.clear()
        os.environ.update(request.environment | self._changed)


def _take_over(client: int) -> None:
    """Give this process the limits, cores and priorities of the client, which it has from the raylet."""
    with suppress(OSError, ValueError):  # the client may have ended
        for limit in _LIMITS:
            resource.setrlimit(limit, resource.prlimit(client, limit))
        os.sched_setaffinity(0, os.sched_getaffinity(client))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, client))
        # The raylet has the kernel kill its workers before other processes.
        score = Path(f"/proc/{client}/oom_score_adj").read_text(encoding="ascii")
        Path("/proc/self/oom_score_adj").write_text(score, encoding="ascii")


def _receive(connection: socket.socket, client: int) -> tuple[Request, list[int]]:
    """The request of a client, and descriptors of its standard streams. Raises `OSError` or `ValueError`."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
    try:
        with connection.makefile("rb") as stream:
            head += stream.read(LENGTH_BYTES - len(head))
            text = stream.read(int.from_bytes(head, "big"))
        given: dict[str, Any] = json.loads(text)
        if len(descriptors) != 3:
            raise ValueError(f"expected 3 descriptors, found {len(descriptors)}")
        return Request(**given, client=client), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _run(request: Request) -> None:
    """Run the worker as Python would in a new process."""
    _apply(request.environment)
    program = request.worker[0]
    sys.argv[:] = request.worker
    runpy.run_path(program, run_name="__main__")


def _apply(environment: Mapping[str, str]) -> None:
    """Apply the variables that libraries read when they are loaded, and the seeds that a new process draws."""
    import numpy
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    numpy.random.seed()


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
