"""The external faults of a soak and their times. Pure: the seed determines all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Target = TypeVar("Target")

FaultKind = Literal[
    "KillProcess",
    "DeletePod",
    "DeletePodAtOnce",
    "KillShim",
    "KillContainerd",
    "KillKubelet",
    "KillOperator",
    "DeleteOperator",
    "KillApiServer",
    "StopApiServer",
    "KillEtcd",
    "KillProgram",
]
"""KillProcess: any process in a pod of a job, including its sandbox. DeletePodAtOnce: without a grace period.
StopApiServer: the API server is suspended for a while. KillProgram: another program of the control plane. Kills use
SIGKILL."""

_DECK: tuple[FaultKind, ...] = (
    *("KillProcess",) * 5,
    *("DeletePod",) * 2,
    *("DeletePodAtOnce",) * 2,
    "KillShim",
    "KillContainerd",
    *("KillKubelet",) * 2,
    *("KillOperator",) * 2,
    "DeleteOperator",
    "KillApiServer",
    *("StopApiServer",) * 2,
    "KillEtcd",
    "KillProgram",
)
_GAP_SECONDS = (20.0, 50.0)
_AWAY_SECONDS = (5.0, 40.0)


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault with its time."""

    at_seconds: float
    """Seconds after the start of the soak."""
    kind: FaultKind
    draw: float
    """In [0, 1); selects one of the targets that exist at that time."""
    away_seconds: float
    """Time that a suspended target stays suspended."""


def planned_faults(seed: int, seconds: float) -> list[PlannedFault]:
    """All faults of a soak of `seconds`. Kinds are dealt from a shuffled deck, so each kind has its turn."""
    chance = random.Random(seed)
    planned: list[PlannedFault] = []
    deck: list[FaultKind] = []
    at_seconds = chance.uniform(*_GAP_SECONDS)
    while at_seconds < seconds:
        if not deck:
            deck = chance.sample(_DECK, len(_DECK))
        planned.append(PlannedFault(at_seconds, deck.pop(), chance.random(), chance.uniform(*_AWAY_SECONDS)))
        at_seconds += chance.uniform(*_GAP_SECONDS)
    return planned


def choose(targets: Sequence[Target], draw: float) -> Target | None:
    """The target that `draw` selects; None if there is none."""
    return targets[int(draw * len(targets))] if targets else None
