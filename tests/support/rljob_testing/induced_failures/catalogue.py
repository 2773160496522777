"""The programs, by failure class."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures import programs as package

SKIPPED_EXIT_CODE = 77
"""Exit code of a program whose requirements this machine lacks; the last line of its output names them."""


class NotPossibleHere(Exception):
    """The message names the missing requirement."""


@dataclass(frozen=True, slots=True)
class FailingProgram:
    """A program that runs out of memory on purpose."""

    failure_class: FailureClass
    name: str
    run: Callable[[Path], None]
    """Called with the folder for evidence; ends in the failure."""
    seconds: int
    """Longest time on the GPU."""
    variables: dict[str, str]
    """Environment variables, set before the process starts."""
    needs_gpu: bool
    """False if it also runs without a GPU."""

    @property
    def title(self) -> str:
        return f"{self.failure_class}.{self.name}"


_PROGRAMS: dict[str, FailingProgram] = {}


def induces(
    failure_class: FailureClass,
    *,
    seconds: int = 30,
    variables: dict[str, str] | None = None,
    needs_gpu: bool = True,
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register the decorated function as a program that fails with `failure_class`."""

    def enter(run: Callable[[Path], None]) -> Callable[[Path], None]:
        program = FailingProgram(failure_class, run.__name__, run, seconds, variables or {}, needs_gpu)
        _PROGRAMS[program.title] = program
        return run

    return enter


def programs() -> list[FailingProgram]:
    """All programs, class by class."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    order = list(FailureClass)
    return sorted(_PROGRAMS.values(), key=lambda program: (order.index(program.failure_class), program.name))
