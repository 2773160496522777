"""Growth of a process's memory before its failure, over samples at comparable points of its work."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from rljob_memory.evidence.collected import MemorySeries
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB
from rljob_memory.trend import Trend, past_growth

_FEW_VALUES = 4
_STATE_SHARE = 0.125
_FIRST_STEPS = 2
_LEAST_VALUES_ALONE = 9
_LEAST_VALUES_OF_STEPS = 4
_LEAST_SHARE_ALONE = 0.3
_LEAST_TAU_ALONE = 0.7
_OF_STEPS = re.compile(r"step|iter|epoch|batch", re.IGNORECASE)
"""A log without a failure needs more growth than one that ends in it; figures of few digits are often equal."""


@dataclass(frozen=True, slots=True)
class PastGrowth:
    """Memory that grew."""

    trend: Trend

    unit: str
    """Work between two values: `micro-batch`, `step`, or `sample` if the log does not name steps."""


def allocated_growth(series: MemorySeries) -> PastGrowth | None:
    """Growth of memory in tensors: over the micro-batches of the latest step, else over the same phase of the steps.

    The first micro-batch is left out: it creates the gradients.
    """
    micro_batches = [sample for sample in series.samples if sample.micro_batch is not None]
    if micro_batches:
        latest = [sample.allocated_bytes for sample in micro_batches if sample.step == micro_batches[-1].step]
        if trend := past_growth(latest[1:]):
            return PastGrowth(trend, "micro-batch")
    return _growth_over_steps(series, lambda sample: sample.allocated_bytes)


def arrived_state(series: MemorySeries, total_bytes: int) -> tuple[int, int] | None:
    """Memory in tensors before and after one large step up at the beginning, and none later: the optimizer's state.

    None if the second value is not at least an eighth of the GPU above the first, or if the series has more values.
    """
    values = [sample.allocated_bytes for sample in series.samples if sample.micro_batch is None]
    if not 2 <= len(values) <= _FEW_VALUES:
        return None
    before, after = values[0], min(values[1:])
    return (before, after) if after - before >= _STATE_SHARE * total_bytes else None


def large_growth(series: MemorySeries) -> tuple[int, int] | None:
    """The median of the first and of the last third of the values of memory in tensors, if it grew by 30 % and 1 GiB.

    Nearly all changes must be growth. The first two values are left out: the optimizer's state arrives with them. None
    for a series whose lines do not name their place, which may be any. A few values suffice if their lines name a step:
    then they were taken at the same point of the work, and none of them may be less than the one before.
    """
    values = [sample.allocated_bytes for sample in series.samples][_FIRST_STEPS:]
    if len(values) < (_LEAST_VALUES_OF_STEPS if _OF_STEPS.search(series.name) else _LEAST_VALUES_ALONE):
        return None
    if not series.name or (len(values) < _LEAST_VALUES_ALONE and values != sorted(values)):
        return None
    third = len(values) // 3
    first, last = round(median(values[:third])), round(median(values[-third:]))
    if last - first < max(GIB, _LEAST_SHARE_ALONE * first):
        return None
    changes = [later - earlier for earlier, later in combinations(values, 2) if later != earlier]
    tau = sum(1 if change > 0 else -1 for change in changes) / len(changes)
    return (first, last) if tau >= _LEAST_TAU_ALONE else None


def reserved_growth(series: MemorySeries) -> PastGrowth | None:
    """Growth of the memory that torch's allocator holds, over the steps."""
    return _growth_over_steps(series, lambda sample: None if sample.cache_bytes is None else sample.reserved_bytes)


def _growth_over_steps(series: MemorySeries, size: Callable[[MemorySample], int | None]) -> PastGrowth | None:
    by_phase: dict[str | None, list[MemorySample]] = defaultdict(list)
    for sample in series.samples:
        if sample.micro_batch is None:
            by_phase[sample.phase].append(sample)
    found = []
    for samples in by_phase.values():
        values = [value for sample in samples if (value := size(sample)) is not None]
        if trend := past_growth(values):
            found.append(PastGrowth(trend, "step" if samples[0].step is not None else "sample"))
    return max(found, key=lambda growth: growth.trend.growth_bytes, default=None)
