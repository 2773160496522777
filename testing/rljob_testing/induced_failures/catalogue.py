"""The programs that run out of memory on purpose, by the class of their failure."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures import programs as package

SKIPPED_EXIT_CODE = 77
"""A program's exit code where the machine cannot do what it needs; its last line says what that is."""


class NotPossibleHere(Exception):
    """The message says what the machine lacks."""


@dataclass(frozen=True, slots=True)
class Program:
    """`run` takes the folder for its evidence and ends in the failure. `seconds`: longest time on the GPU.

    `variables`: of its environment, set before it starts. `needs_gpu`: whether it cannot do without one.
    """

    failure_class: FailureClass
    name: str
    run: Callable[[Path], None]
    seconds: int
    variables: dict[str, str]
    needs_gpu: bool

    @property
    def title(self) -> str:
        return f"{self.failure_class}.{self.name}"


_PROGRAMS: dict[str, Program] = {}


def induces(
    failure_class: FailureClass,
    *,
    seconds: int = 30,
    variables: dict[str, str] | None = None,
    needs_gpu: bool = True,
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Enter the decorated function as a program that ends in a failure of `failure_class`."""

    def enter(run: Callable[[Path], None]) -> Callable[[Path], None]:
        program = Program(failure_class, run.__name__, run, seconds, variables or {}, needs_gpu)
        _PROGRAMS[program.title] = program
        return run

    return enter


def programs() -> list[Program]:
    """All of them, class by class."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    order = list(FailureClass)
    return sorted(_PROGRAMS.values(), key=lambda program: (order.index(program.failure_class), program.name))
