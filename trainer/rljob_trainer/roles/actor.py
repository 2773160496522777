"""A role in its own process: a Ray actor that logs to a file and raises failures that the controller can read."""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rljob_api.memory_failure import FailureKind
from rljob_client.errors import BadInput, OutputUnavailable, RunError
from rljob_memory.evidence.exception import account_of
from rljob_memory.evidence.lines import time_mark
from rljob_memory.evidence.signatures import failure_kind
from rljob_trainer.errors import DeviceOutOfMemory, HostOutOfMemory, OutOfMemory, SharedMemoryExhausted
from rljob_trainer.roles.faults import InjectedFault
from rljob_trainer.roles.time_limit import current_limit, stacks_written_after
from rljob_trainer.telemetry.out_of_memory import take_account

_HOST = {FailureKind.HOST}
_SHARED_MEMORY = {
    FailureKind.SHARED_MEMORY,
    FailureKind.SHARED_SEGMENT,
    FailureKind.SEMAPHORE,
    FailureKind.OBJECT_STORE,
}
_DISK_FULL = ("No space left on device", "Disk quota exceeded", "inline_container.cc")
"""The last one is torch's writer of archives, which reports a short write by a position in its file."""
_ORDINARY = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(NotImplementedError, RecursionError, TypeError, ValueError),
)
_MAY_PASS = re.compile(
    r"cuda|cublas|cudnn|nccl|gloo|\bhip\b|driver|device|peer|process group|connect|socket|\b(tcp)?store\b|rendezvous|"
    r"closed|timed? ?-?out|broken pipe|temporarily|interrupted|killed|worker|engine core|memory",
    re.IGNORECASE,
)
"""Words of errors that another attempt may not meet, whatever their type."""
_READING = frozenset({"__init__", "load", "start", "export_pretrained"})
"""Calls that read the model and the settings, or write the model. vLLM's assertions in `start` may be about memory that
other processes free at the same time."""
_NOT_OF_MEMORY = {FailureKind.KILLED, FailureKind.LOST, FailureKind.NO_MESSAGE, FailureKind.BUS_ERROR}


class RoleActor:
    """Holds the object of one role and calls its methods by name.

    The class of the role is given by name, so that the controller, which creates the actor, imports neither torch nor
    vLLM. For the same reason, failures that a person can act on leave the process as a `RunError`.
    """

    def __init__(self, name: str, role: str, log: Path) -> None:
        """`name`: such as `policy-0`. `role`: the class, as `module:Class`. `log`: receives stdout and stderr."""
        _redirect_output(log)
        _set_title(name)
        warm = " with its imports done" if role.partition(":")[0] in sys.modules else ""
        _mark_log(f"{name} starts as process {os.getpid()}{warm}")
        self._name = name
        self._class_name = role
        self._role: Any = None
        self._construct_failure: Exception | None = None
        self._faults: list[InjectedFault] = []

    def construct(self, *arguments: Any) -> int:
        """Create the role's object. Returns the process id."""
        module, _, name = self._class_name.partition(":")
        try:
            with _readable_failures(self._name, "__init__"):
                with long_imports():
                    role = getattr(importlib.import_module(module), name)
                self._role = role(*arguments)
        except Exception as error:
            self._construct_failure = error
            raise
        return os.getpid()

    def call(self, seconds: float | None, method: str, *arguments: Any) -> Any:
        """Call a method of the role. `seconds`: its time limit, at which this process writes its stacks.

        Raises the failure of the method, or of the construction of the role.
        """
        with _readable_failures(self._name, method), stacks_written_after(seconds):
            if self._construct_failure is not None:  # nobody has waited for it
                raise self._construct_failure
            if fault := next((fault for fault in self._faults if fault.method == method), None):
                self._faults.remove(fault)
                fault.fail_in(self._role)
            return getattr(self._role, method)(*arguments)

    def inject(self, fault: InjectedFault) -> None:
        """Fail in the next call of the fault's method."""
        self._faults.append(fault)


@dataclass(frozen=True, slots=True)
class RoleHandle:
    """A role in another process: `handle.update.remote(batch)` calls its method and returns a result reference."""

    actor: Any
    name: str
    """Such as `rollout-0`."""

    def __getattr__(self, method: str) -> RemoteMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        return RemoteMethod(self.actor, method)


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    actor: Any
    method: str

    def remote(self, *arguments: Any) -> Any:
        limit = current_limit()
        return self.actor.call.remote(limit and limit.seconds_left, self.method, *arguments)


def spawn(name: str, role: str, log: Path, options: Mapping[str, Any]) -> RoleHandle:
    """Start the role's process with `options` of Ray's actors. Returns before the process has started."""
    import ray

    return RoleHandle(ray.remote(RoleActor).options(**options).remote(name, role, log), name)


@contextmanager
def _readable_failures(actor: str, method: str) -> Iterator[None]:
    """Convert known failures of the block, a call of `method`, to a `RunError` that names the actor."""
    try:
        yield
    except RunError as error:
        # Ray wraps an error of another actor in a class that cannot be raised again here.
        raise (_of_another_actor(error) or error.of(error.actor or actor)) from None
    except Exception as error:
        known = known_failure(error) or refused_input(error, method)
        if known is None:
            raise
        with suppress(OSError):  # the log may lie on a full disk
            _mark_log(f"{actor} failed")
            traceback.print_exception(error, file=sys.stderr)
            sys.stderr.flush()
        # `from None`: the cause may hold torch objects.
        raise known.of(actor) from None


def _of_another_actor(error: RunError) -> RunError | None:
    """The error that was raised in another actor, called from this one; None if it was raised here."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, RunError) else None


def known_failure(error: Exception) -> RunError | None:
    """The `RunError` for memory that ran out or a full disk; None for other errors."""
    text = str(error)
    kind = failure_kind(f"{type(error).__name__}: {text}" if text else type(error).__name__)
    known: OutOfMemory
    kind_of_torch = "OutOfMemoryError" in {cls.__name__ for cls in type(error).__mro__}
    if kind_of_torch:
        known = DeviceOutOfMemory(text)
    elif any(words in text for words in _DISK_FULL) and "/dev/shm" not in text and kind not in _SHARED_MEMORY:
        return OutputUnavailable(f"the disk is full: {_last_line(text)}")
    elif kind is None or kind in _NOT_OF_MEMORY:
        return None
    elif kind in _HOST:
        known = HostOutOfMemory(text or type(error).__name__)
    else:
        known = SharedMemoryExhausted(text) if kind in _SHARED_MEMORY else DeviceOutOfMemory(text)
    known.out_of_memory = (take_account(text) if kind_of_torch else None) or account_of(error)
    return known


def refused_input(error: Exception, method: str) -> BadInput | None:
    """The `BadInput` for an exception with which a library refuses model or settings while a role starts, or while it
    exports the model; None for other errors."""
    if method not in _READING or not is_repeatable(error) or isinstance(error, AssertionError):
        return None
    if type(error) is RuntimeError:  # also of drivers and kernels, whose words are not all known
        return None
    kind, said = type(error).__name__, str(error) or "no message"
    if "trust_remote_code" in said:  # RLJob has no such setting
        said = "the model needs code of its own, which RLJob never runs"
    failure = BadInput(f"{kind}: {said}; the same model and settings fail again: change them")
    failure.raised = kind
    return failure


def is_repeatable(error: BaseException) -> bool:
    """True for an ordinary Python exception, which the same work raises again. False for errors of devices, networks
    and files, which may pass: torch, NCCL and gloo raise `RuntimeError`, and classes that are derived from it."""
    ordinary = isinstance(error, _ORDINARY) or type(error) is RuntimeError
    return ordinary and not _MAY_PASS.search(str(error))


def _last_line(text: str) -> str:
    """The last line, which names the error if `text` contains a traceback."""
    return text.strip().splitlines()[-1].strip()


JOB_VARIABLE = "RLJOB_NAME"
"""Environment variable with the name of the job."""


def _set_title(name: str) -> None:
    """Show this process as `rljob: policy-0 (job sums)` in ps and top. Ray would replace the title in each call."""
    raylet: Any = importlib.import_module("ray._raylet")
    job = os.environ.get(JOB_VARIABLE)
    raylet.setproctitle(f"rljob: {name}{f' (job {job})' if job else ''}")
    raylet.setproctitle = lambda _title: None


def _mark_log(what: str) -> None:
    print(time_mark(datetime.now(UTC), what), file=sys.stderr, flush=True)


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


@contextmanager
def long_imports() -> Iterator[None]:
    """Speed up imports that take seconds, such as torch's and vLLM's: they create no garbage to collect.

    The garbage collector is disabled in the block, and later ignores the objects that exist at its end. Both together
    save a fifth of the start of an engine, which collects repeatedly.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
