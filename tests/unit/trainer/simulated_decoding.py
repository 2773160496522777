"""Decoding steps of several engines, counted without a model: every running sequence gets one token in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from rljob_trainer.roles.generation import WorkQueue

LONGEST = 1024
"""Most tokens of a response."""


@dataclass
class DecodingEngine:
    """An engine that generates a token of `concurrent` sequences in each step, and the other sequences after them."""

    concurrent: int
    sequences: list[int] = field(default_factory=list)
    """Tokens that each unfinished sequence still needs."""

    def step(self) -> None:
        running = [tokens - 1 for tokens in self.sequences[: self.concurrent]]
        self.sequences = [*filter(None, running), *self.sequences[self.concurrent :]]


Lengths = Sequence[Sequence[int]]
"""Tokens of each response of each group."""


def drawn_lengths(random: Random, groups: int, group_size: int) -> tuple[list[float], list[list[int]]]:
    """Means of groups, of lognormal distribution (sigma 0.7, median 148), and lengths within 50 % of them."""
    means = [random.lognormvariate(5, 0.7) for _ in range(groups)]
    return means, [
        [min(LONGEST, 1 + int(mean * random.uniform(0.5, 1.5))) for _ in range(group_size)] for mean in means
    ]


def steps_with_queue(queue: WorkQueue, engines: int, lengths: Lengths) -> int:
    """Steps until all groups are complete, of engines that take them from `queue`."""
    return _steps(queue, lengths, queue.first_portions(engines))


def steps_with_shares(engines: int, concurrent: int, lengths: Lengths) -> int:
    """The same for engines of which each begins with an equal number of successive groups."""
    bounds = [len(lengths) * engine // engines for engine in range(engines + 1)]
    shares = [list(range(first, last)) for first, last in pairwise(bounds)]
    return _steps(WorkQueue([], concurrent), lengths, shares)


def least_steps(engines: int, concurrent: int, lengths: Lengths) -> float:
    """A bound: no slot is ever idle, unless one response alone takes longer."""
    return max(sum(map(sum, lengths)) / (engines * concurrent), max(map(max, lengths)))


def _steps(queue: WorkQueue, lengths: Lengths, portions: list[list[int]]) -> int:
    engines = [
        DecodingEngine(queue.concurrent_sequences, [tokens for item in portion for tokens in lengths[item]])
        for portion in portions
    ]
    steps = 0
    while any(engine.sequences for engine in engines):
        for engine in engines:
            engine.step()
            if len(engine.sequences) <= queue.sequences_left:
                for item in queue.portion(len(engine.sequences), len(engines)):
                    engine.sequences += lengths[item]
        steps += 1
    return steps
