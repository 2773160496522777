"""Which items of a task a step gets: a pure function of seed and step, so that any step can be made again."""

from __future__ import annotations

import numpy as np


def prompts_of_step(step: int, prompts_per_step: int, size: int, seed: int) -> list[int]:
    """Indices (0 … size - 1) of the items of `step`, counted from 1.

    The steps draw without gaps from an endless row of epochs, each a permutation of all items of its own; a step may
    reach from one epoch into the next.
    """
    if step < 1 or size < 1:
        raise ValueError(f"expected step and size from 1, found step {step} and size {size}")
    first = (step - 1) * prompts_per_step
    positions = range(first, first + prompts_per_step)
    permutations = {epoch: _permutation(epoch, size, seed) for epoch in {position // size for position in positions}}
    return [int(permutations[position // size][position % size]) for position in positions]


def _permutation(epoch: int, size: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng([seed, epoch]).permutation(size)
