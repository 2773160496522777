"""Work of an engine for a step: groups that it completes, or lots of which it completes a quota."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rljob_trainer.rollout.lots import Lot


@dataclass(frozen=True, slots=True)
class WholeGroups:
    """Groups to complete."""

    prompts: Sequence[Sequence[int]]
    """Tokens of each prompt."""

    group_size: int
    """Completions of each prompt."""

    seeds: Sequence[int]
    """Of each prompt."""


EngineWork = WholeGroups | list[Lot]
