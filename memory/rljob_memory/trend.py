"""Growth of memory over the samples of one process, as opposed to noise, warm-up and a series that has settled.

`past_growth` detects growth after a failure. `ongoing_growth` detects steady growth that continues, before a failure.
Both use Kendall's tau of the values and their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

from rljob_memory.sizes import MIB

RESIZE_STEPS = 6
"""Steps before memory runs out at which the limit of a container is raised. That costs nothing, and takes seconds."""
RECYCLE_STEPS = 2
"""The same for a process whose memory grows, which ends and starts anew: late, because that takes time."""

_LEAST_TAU = 0.8
"""Nine pairs in ten grow."""

_LEAST_PAST_VALUES = 8
_MOST_PAST_VALUES = 128
_LEAST_PAST_GROWTH_BYTES = 256 * MIB
_LEAST_PAST_GROWTH_SHARE = 0.05

_LEAST_ONGOING_VALUES = 10
_LEAST_STEADY_VALUES = 6
"""A series that grows by the same amount each time needs fewer: of 720 orders of 6 values only one grows throughout."""
_LATEST_VALUES = 4
_LEAST_TAU_OF_LATER_HALF = 0.7
_STEADY_FACTOR = 2.0
"""Largest ratio of an increment of a steady series to the usual one, in both directions."""
_NOT_SLOWING = 0.8
"""With these, one job in eighty whose cache only follows ever rarer record lengths is taken for one that grows; growth
at random steps is found after 11 of them (medians of simulated jobs)."""
_FIRM_TAU = 0.95
"""Kendall's tau from which a trend is firm."""

_LEAST_UNCLEAR_STEADY_VALUES = 4
_LEAST_UNCLEAR_VALUES = 8
_LEAST_UNCLEAR_TAU = 0.7
_LEAST_UNCLEAR_TAU_OF_LATER_HALF = 0.5


@dataclass(frozen=True, slots=True)
class Trend:
    """A series of sizes that grows."""

    first_bytes: int
    last_bytes: int

    values: int
    """Number of values."""

    slope_bytes: float
    """Growth from one value to the next: the median over all pairs (Theil and Sen), or over those of the latest 4
    values if they grow faster."""

    is_firm: bool
    """Nearly every pair of values grows."""

    is_clear: bool = True
    """There are enough values, and no sign that growth slows down. False: it is worth an action only shortly before
    memory runs out, when a false alarm costs less than waiting."""

    @property
    def growth_bytes(self) -> int:
        return self.last_bytes - self.first_bytes

    @property
    def mean_growth_bytes(self) -> int:
        """Growth from one value to the next, on average."""
        return self.growth_bytes // (self.values - 1)


def past_growth(values: Sequence[int]) -> Trend | None:
    """The trend of the latest 128 values if they grew: nine pairs in ten, by 256 MiB and 5 % in all.

    With the least number of values, 8, batches of random length look like that one time in a thousand (p = 0.0009).
    """
    values = values[-_MOST_PAST_VALUES:]
    if len(values) < _LEAST_PAST_VALUES:
        return None
    growth = values[-1] - values[0]
    if growth < max(_LEAST_PAST_GROWTH_BYTES, _LEAST_PAST_GROWTH_SHARE * values[0]):
        return None
    tau = kendall_tau(values)
    return _trend(values, tau) if tau >= _LEAST_TAU else None


def ongoing_growth(values: Sequence[int], least_growth_bytes: float) -> Trend | None:
    """The trend of `values` if they grow by at least `least_growth_bytes` from first to last and are still growing.

    It is clear if nine pairs in ten grow, and the later half grows, too, and hardly slower than the earlier. A series
    that settles, however many steps up it took, fails the last condition.
    """
    if len(values) < _LEAST_UNCLEAR_STEADY_VALUES or values[-1] - values[0] < max(least_growth_bytes, 1):
        return None
    tau, later_tau = kendall_tau(values), kendall_tau(values[len(values) // 2 :])
    if _is_steady(values):
        is_clear = len(values) >= _LEAST_STEADY_VALUES
    elif (
        len(values) < _LEAST_UNCLEAR_VALUES or tau < _LEAST_UNCLEAR_TAU or later_tau < _LEAST_UNCLEAR_TAU_OF_LATER_HALF
    ):
        return None
    else:
        is_clear = len(values) >= _LEAST_ONGOING_VALUES and tau >= _LEAST_TAU and _is_still_growing(values)
    return _trend(values, tau, is_clear=is_clear)


def still_grows(values: Sequence[int]) -> bool:
    """True if the later half of the values grows, and hardly slower than the earlier: a running maximum settles."""
    return len(values) >= _LEAST_STEADY_VALUES and _is_still_growing(values[-_MOST_PAST_VALUES:])


def kendall_tau(values: Sequence[int]) -> float:
    """The share of pairs that grow minus the share that shrink, from -1 to 1. Needs at least two values."""
    pairs = list(combinations(values, 2))
    return sum((later > earlier) - (later < earlier) for earlier, later in pairs) / len(pairs)


def theil_sen_slope(values: Sequence[int]) -> float:
    """The median of the slopes between all pairs of values; one outlier in four does not move it."""
    numbered = combinations(enumerate(values), 2)
    return median((later - earlier) / (j - i) for (i, earlier), (j, later) in numbered)


def _trend(values: Sequence[int], tau: float, *, is_clear: bool = True) -> Trend:
    slope = max(theil_sen_slope(values), theil_sen_slope(values[-_LATEST_VALUES:]))
    return Trend(values[0], values[-1], len(values), slope, tau >= _FIRM_TAU, is_clear)


def _is_steady(values: Sequence[int]) -> bool:
    """True if every increment is much like the others."""
    increments = [later - earlier for earlier, later in pairwise(values)]
    usual = median(increments)
    return all(usual / _STEADY_FACTOR <= increment <= usual * _STEADY_FACTOR for increment in increments) and usual > 0


def _is_still_growing(values: Sequence[int]) -> bool:
    middle = len(values) // 2
    earlier, later = values[: middle + 1], values[middle:]
    if kendall_tau(later) < _LEAST_TAU_OF_LATER_HALF:
        return False
    return theil_sen_slope(later) >= _NOT_SLOWING * max(theil_sen_slope(earlier), 0.0)
