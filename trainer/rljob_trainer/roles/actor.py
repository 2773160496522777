"""A role as a process of its own: a Ray actor whose output goes to a file, and whose failures the controller reads."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_trainer.errors import DeviceOutOfMemory, OutputUnavailable, SharedMemoryExhausted, TrainerError


class RoleActor:
    """Holds one role's object and calls its methods by name.

    The class of the role is named, not passed: the controller, which makes the actor, then imports neither torch nor
    vLLM. Failures that a person can act on leave the process as a `TrainerError`, for the same reason.
    """

    def __init__(self, role: str, log: Path) -> None:
        """`role`: the class, as `module:Class`. stdout and stderr are appended to `log`."""
        _redirect_output(log)
        self._class_name = role
        self._role: Any = None

    def construct(self, *arguments: Any) -> int:
        """Make the role's object; returns the process id."""
        module, _, name = self._class_name.partition(":")
        with _readable_failures():
            self._role = getattr(importlib.import_module(module), name)(*arguments)
        return os.getpid()

    def call(self, method: str, *arguments: Any) -> Any:
        with _readable_failures():
            return getattr(self._role, method)(*arguments)


@dataclass(frozen=True, slots=True)
class RoleHandle:
    """A role in another process: `handle.update.remote(batch)` calls its method and gives a reference to the result."""

    actor: Any

    def __getattr__(self, method: str) -> RemoteMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        return RemoteMethod(self.actor, method)


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    actor: Any
    method: str

    def remote(self, *arguments: Any) -> Any:
        return self.actor.call.remote(self.method, *arguments)


def spawn(role: str, log: Path, options: Mapping[str, Any]) -> RoleHandle:
    """Start the role's process with Ray's actor `options`; returns before it is up."""
    import ray

    return RoleHandle(ray.remote(RoleActor).options(**options).remote(role, log))


@contextmanager
def _readable_failures() -> Iterator[None]:
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        known = _known_failure(error)
        if known is None:
            raise
        traceback.print_exc()
        # `from None`: the cause may hold torch objects.
        raise known from None


def _known_failure(error: Exception) -> TrainerError | None:
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error)
    if "OutOfMemoryError" in names or "CUDA out of memory" in text or "CUDA Error: out of memory" in text:
        return DeviceOutOfMemory(text)
    if "No space left on device" in text:
        return SharedMemoryExhausted(text) if "/dev/shm" in text else OutputUnavailable(f"the disk is full: {text}")
    return None


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
