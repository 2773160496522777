"""What goes wrong from outside the jobs, and when. Pure: a seed says it all."""

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
"""KillProcess: any process in a pod of a job, its sandbox's included. DeletePodAtOnce: without grace. StopApiServer: it
answers nobody for a while. KillProgram: one of the control plane's others. Kills are by SIGKILL."""

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
    """`at_seconds`: after the soak's start. `draw`: at least 0, below 1, chooses among the targets that are there then.
    `away_seconds`: how long what is stopped stays so."""

    at_seconds: float
    kind: FaultKind
    draw: float
    away_seconds: float


def planned_faults(seed: int, seconds: float) -> list[PlannedFault]:
    """All faults of a soak of so many seconds. Kinds are dealt from a shuffled deck, so that each has its turn."""
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


def drawn(targets: Sequence[Target], draw: float) -> Target | None:
    """The target that `draw` chooses; None where there is none."""
    return targets[int(draw * len(targets))] if targets else None
