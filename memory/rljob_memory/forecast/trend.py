"""Whether a series rises steadily and still does: not noise, not the warm-up, not a series that has settled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

_LEAST_VALUES = 10
_LEAST_VALUES_WHEN_STEADY = 6
"""What rises by the same amount each time needs fewer: of 720 orders of 6 values only one rises throughout."""
_LEAST_TAU = 0.8
_LEAST_TAU_OF_LATER_HALF = 0.7
_STEADY_FACTOR = 2.0
_NOT_SLOWING = 0.8
"""With these, one job in eighty whose cache only follows ever rarer record lengths is taken for one that grows; what
grows at random steps is seen after 11 of them (medians of simulated jobs)."""
_FIRMLY = 0.95


@dataclass(frozen=True, slots=True)
class Rise:
    """`slope`: what it rises by from one value to the next (the median over all pairs: Theil and Sen). `firm`: whether
    nearly every pair of values rises."""

    first: int
    last: int
    values: int
    slope: float
    firm: bool


def rising(values: Sequence[int], least_growth: float) -> Rise | None:
    """The rise of `values`, in their order, where there is one of at least `least_growth` from the first to the last.

    Kendall's tau with the order is 0.8 or more (nine pairs in ten rise), and the later half rises too, and hardly
    slower than the earlier. What settles, however many steps up it took, fails the last.
    """
    if len(values) < _LEAST_VALUES_WHEN_STEADY or values[-1] - values[0] < max(least_growth, 1):
        return None
    tau = kendall_tau(values)
    if not _is_steady(values) and (len(values) < _LEAST_VALUES or tau < _LEAST_TAU or not _goes_on(values)):
        return None
    return Rise(values[0], values[-1], len(values), theil_sen_slope(values), tau >= _FIRMLY)


def kendall_tau(values: Sequence[int]) -> float:
    """The share of pairs that rise less the share that fall, -1 to 1. At least two values."""
    pairs = list(combinations(values, 2))
    return sum((later > earlier) - (later < earlier) for earlier, later in pairs) / len(pairs)


def theil_sen_slope(values: Sequence[int]) -> float:
    """The median of the slopes between all pairs of values; one outlier in four does not move it."""
    numbered = combinations(enumerate(values), 2)
    return median((later - earlier) / (j - i) for (i, earlier), (j, later) in numbered)


def _is_steady(values: Sequence[int]) -> bool:
    """Whether every increment is much like the others."""
    increments = [later - earlier for earlier, later in pairwise(values)]
    usual = median(increments)
    return all(usual / _STEADY_FACTOR <= increment <= usual * _STEADY_FACTOR for increment in increments) and usual > 0


def _goes_on(values: Sequence[int]) -> bool:
    middle = len(values) // 2
    earlier, later = values[: middle + 1], values[middle:]
    if kendall_tau(later) < _LEAST_TAU_OF_LATER_HALF:
        return False
    return theil_sen_slope(later) >= _NOT_SLOWING * max(theil_sen_slope(earlier), 0.0)
