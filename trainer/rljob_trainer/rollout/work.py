"""Work of an engine for a step: groups that it completes, or lots of which it completes a quota."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rljob_memory.sample import MemorySample
from rljob_trainer.rollout.lots import Lot


@dataclass(frozen=True, slots=True)
class WholeGroups:
    """Groups to complete."""

    places: Sequence[int]
    """Of each prompt in the step."""

    prompts: Sequence[Sequence[int]]
    """Tokens of each prompt."""

    group_size: int
    """Completions of each prompt."""

    seeds: Sequence[int]
    """Of each prompt."""


@dataclass(frozen=True, slots=True)
class Lots:
    """Lots to complete."""

    places: Sequence[int]
    """Of each lot among those of the step."""

    lots: Sequence[Lot]


EngineWork = WholeGroups | Lots


@dataclass(frozen=True, slots=True)
class Generated:
    """The results of one call to a process of an engine."""

    results: list[tuple[int, Any]]
    """Place and result of each group or lot that was completed: a list of completions, or a LotResult. Empty in all
    processes of an engine but the first."""

    unfinished_sequences: int
    """Sequences of groups that the engine has begun, or is about to begin, and not completed."""

    memory: MemorySample | None
    """Of the process, with the peaks since the engine began to generate. None if it has not finished."""
