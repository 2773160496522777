"""The server of a role: imports its libraries, then forks a process for each request of `setup_worker.py`.

The first role's server imports what the roles share, and forks those of the others, so that torch is imported once. A
forked process can use neither the threads nor the CUDA context of its parent. Modules whose import creates one of them
depend on versions and drivers: a group is imported in a fork, which replaces its parent if it can be forked itself.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.status import Role
from rljob_api.tracking import TRACKERS
from rljob_trainer.hardware import Device
from rljob_trainer.roles.actor import long_imports
from rljob_trainer.roles.warm.gpu_answers import gpus_answered
from rljob_trainer.roles.warm.setup_worker import DIRECTORY_VARIABLE, FORKED, LENGTH_BYTES, READY

MODULES: Mapping[Role, Sequence[Sequence[str]]] = {
    "policy": (
        (
            "rljob_trainer.roles.policy_actor",
            "transformers.models.auto.auto_factory",
            "transformers.models.llama.modeling_llama",
        ),
    ),
    "rollout": (
        (
            "rljob_trainer.roles.rollout_actor",
            "transformers.models.auto.image_processing_auto",
            "openai.types.responses",
            "fastapi",
        ),
        ("torch._inductor.lowering",),
    ),
}
"""Groups of modules to import by role, with those that they import: for every model, most of what its own module
imports, and four fifths of what vLLM imports. A fork can do without a group."""

OF_DEVICE: Mapping[tuple[Role, Device], Sequence[Sequence[str]]] = {
    ("policy", "cpu"): (),
    ("policy", "cuda"): (("torch._inductor.compile_fx",), ("rljob_trainer.policy.cute_kernels",)),
    ("rollout", "cpu"): (("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama"),),
    ("rollout", "cuda"): (("vllm.entrypoints.llm", "vllm.v1.worker.gpu_worker", "vllm.model_executor.models.llama"),),
}
"""Further groups: vLLM, and the compiler of a policy's layers and its attention, which are for GPUs alone."""

_SHARED = ("torch",)
"""Modules of all roles. They must not read the variables in which roles differ, as torch._dynamo and Hugging Face's
libraries do, which torch itself does not import."""

IMPORTED_IN_FORKS = ("ray", "pyarrow", "pandas", "scipy", "sklearn", "dill")
"""When its library is loaded, Ray reads the process's job and raylet from the environment, and never again. vLLM tries
to import it, for executors that are not used here. pyarrow starts threads. transformers imports it, pandas, SciPy and
scikit-learn if they are installed, for models and metrics that no role uses; without them, the imports of an engine
take a sixth less time. torch would pickle graphs with dill, whose pickler is written in Python: vLLM would take several
times as long to save its compiled code."""

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
_PROCESS_VARIABLES = {
    *SERVER_ENVIRONMENT,
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *(DIRECTORY_VARIABLE, "GLOO_SOCKET_IFNAME", "RLJOB_NAME", "PYTHONBREAKPOINT"),
    *("COLUMNS", "PWD", "OLDPWD", "SHLVL", "_"),
}
_OF_TRACKERS = [f"{start}{name.upper()}_" for name in TRACKERS for start in ("", "_")]
"""mlflow sets `_MLFLOW_TELEMETRY_SESSION_ID` in a controller that imports it."""
_PROCESS_PREFIXES = ("RAY_", "NCCL_", "TORCH_NCCL_", *_OF_TRACKERS)
"""Variables that nothing reads while it is imported. If others differ, the process is not forked."""

_REQUEST_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_CUDA_NOT_INITIALIZED = 3
_OBSTACLE = 100
"""Exit code of a fork whose modules are not to be imported."""
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


def main(
    roles: Mapping[Role, int],
    variables: Mapping[Role, Mapping[str, str]],
    capability: Sequence[int] | None,
    parent: int,
) -> None:
    """Serve each role in a process of its own until the process `parent` ends. In a fork, run the worker.

    `roles`: descriptor of each role's socket, at which clients wait during the imports. `variables`: those of the
    environment that only the role's processes have. `capability`: CUDA compute capability of the GPUs; None: the roles
    use the CPU.
    """
    _end_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    listeners = {role: socket.socket(fileno=descriptor) for role, descriptor in roles.items()}
    for listener in listeners.values():
        os.set_inheritable(listener.fileno(), False)
    before = dict(os.environ)
    role, *others = listeners
    if others:
        _import(_SHARED, capability)
        role = _forked_role(role, others)
    os.environ.update(variables[role])
    for other in listeners.keys() - {role}:
        listeners.pop(other).close()
    of_device = OF_DEVICE[role, "cpu" if capability is None else "cuda"]
    _continue_with([*MODULES[role], *of_device], role, capability)
    before |= variables[role]
    changed = {name: os.environ[name] for name in differences(os.environ, before) if name in os.environ}
    _run(serve(listeners[role], before, changed))


def _forked_role(role: Role, others: Sequence[Role]) -> Role:
    """Fork a server for each of the other roles. Returns the role that this process serves."""
    if obstacle := obstacle_to_forks():
        sys.exit(f"role processes start without servers: torch: {obstacle}")
    server = os.getpid()
    for other in others:
        if os.fork() == 0:
            _end_with(server)
            return other
    return role


def _continue_with(groups: Sequence[Sequence[str]], role: Role, capability: Sequence[int] | None) -> None:
    """Import each group of modules in a fork of the process before. Returns in the last fork.

    A fork that could not be forked itself ends, and its parent continues without the group. Otherwise, a parent ends
    with its fork.
    """
    for modules in groups:
        server = os.getpid()
        if (fork := os.fork()) == 0:
            _end_with(server)
            try:
                _import(modules, capability)
                obstacle = obstacle_to_forks()
            except Exception as error:
                obstacle = f"{type(error).__name__}: {error}"
            if obstacle:
                print(f"{role} processes import {' and '.join(modules)} themselves: {obstacle}", flush=True)
                os._exit(_OBSTACLE)
        elif os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) != _OBSTACLE:
            os._exit(1)


def _import(modules: Sequence[str], capability: Sequence[int] | None) -> None:
    """Import `modules`, without the libraries that only forks may import."""
    sys.modules.update(dict.fromkeys(IMPORTED_IN_FORKS))  # type: ignore[arg-type]
    with long_imports(), gpus_answered(capability):
        for module in modules:
            importlib.import_module(module)
    for module in IMPORTED_IN_FORKS:
        del sys.modules[module]


def obstacle_to_forks() -> str | None:
    """A reason not to fork this process; None if there is none."""
    threads = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    if threads:
        with suppress(OSError):  # it has ended
            return f"its import has started the thread {(threads[0] / 'comm').read_text(encoding='utf-8').strip()}"
    with suppress(OSError):
        found = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(found)) != _CUDA_NOT_INITIALIZED:
            return "its import has initialized CUDA"
    return None


def differences(environment: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    """Names of variables that differ and that imports may read or set."""
    names = {name for name in {*environment, *own} if environment.get(name) != own.get(name)}
    return sorted(name for name in names if name not in _PROCESS_VARIABLES and not name.startswith(_PROCESS_PREFIXES))


def serve(listener: socket.socket, own: Mapping[str, str], changed: Mapping[str, str]) -> Request:
    """Serve requests until this process is killed. Returns in each forked worker, with its request.

    `own`: the environment before the imports. `changed`: the variables that they set.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
    server = os.getpid()
    while True:
        with suppress(OSError, ValueError), listener.accept()[0] as connection:
            connection.settimeout(_REQUEST_SECONDS)
            connection.sendall(READY)  # fails if the client has given up
            request, descriptors = _receive(connection)
            try:
                if differing := differences(request.environment, own):
                    print(f"not forked because of {', '.join(differing)}", flush=True)
                elif os.fork() == 0:
                    _end_with(server)
                    listener.close()
                    _fork_worker(request, descriptors, connection, changed)
                    return request
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)


def _fork_worker(
    request: Request, descriptors: Sequence[int], connection: socket.socket, changed: Mapping[str, str]
) -> None:
    """Fork the worker, and return in it. This process, its keeper, ends with it, and kills it if the client ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keeper = os.getpid()
    try:
        process = os.fork()
        if process == 0:
            _end_with(keeper)
            _become(request, descriptors, changed)
            return
        connection.settimeout(None)
        connection.sendall(FORKED)
        watched = os.pidfd_open(process)
        # A client sends nothing more: its connection is readable once it has ended.
        ended, _, _ = select.select([connection.fileno(), watched], [], [])
        if connection.fileno() in ended:
            os.kill(process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with suppress(OSError):
            connection.sendall(str(code).encode())
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # it must not serve


def _become(request: Request, descriptors: Sequence[int], changed: Mapping[str, str]) -> None:
    """Make this fork the process that the client would have become."""
    os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    with suppress(OSError, ValueError):  # the client may have ended
        # It has its limits, cores and priorities from the raylet.
        for limit in _LIMITS:
            resource.setrlimit(limit, resource.prlimit(request.client, limit))
        os.sched_setaffinity(0, os.sched_getaffinity(request.client))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, request.client))
        # The raylet has the kernel kill its workers before other processes.
        score = Path(f"/proc/{request.client}/oom_score_adj").read_text(encoding="ascii")
        Path("/proc/self/oom_score_adj").write_text(score, encoding="ascii")
    os.chdir(request.directory)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked_signals)
    os.environ.clear()
    os.environ.update({**request.environment, **changed})


def _receive(connection: socket.socket) -> tuple[Request, list[int]]:
    """The request of a client, and descriptors of its standard streams. Raises `OSError` or `ValueError`."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
    try:
        with connection.makefile("rb") as stream:
            head += stream.read(LENGTH_BYTES - len(head))
            text = stream.read(int.from_bytes(head, "big"))
        given: dict[str, Any] = json.loads(text)
        if len(descriptors) != 3:
            raise ValueError(f"expected 3 descriptors, found {len(descriptors)}")
        return Request(**given), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _run(request: Request) -> None:
    """Run the worker as Python would in a new process."""
    _apply(request.environment)
    sys.argv[:] = request.worker
    runpy.run_path(request.worker[0], run_name="__main__")


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
