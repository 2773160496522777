"""The modules of the built-in tasks (`rljob_api.task_args.TASKS`), by name.

Each has `items(args, context)`, the items of the task, and, if the task has its own reward,
`reward(args, context)`, its reward function. Both raise `BadInput`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Inputs of a task other than its arguments."""

    directory: Path
    """Relative paths and Python modules start there."""

    seed: int = 0
    """Seed of generated items."""

    tokenizer: Any | None = None
    """A Hugging Face tokenizer; None if only items or rewards are needed that do not depend on it."""


def task_module(name: str) -> ModuleType:
    """The module of a built-in task."""
    return import_module(f"rljob_trainer.tasks.{name.replace('-', '_')}")
