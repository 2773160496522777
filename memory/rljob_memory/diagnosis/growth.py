"""Growth of a process's memory before its failure, over samples at comparable points of its work."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from rljob_memory.evidence.collected import MemorySeries
from rljob_memory.evidence.figures import Measure
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB
from rljob_memory.trend import Trend, kendall_tau, past_growth, still_grows, theil_sen_slope

_FEW_VALUES = 4
"""A series of at most this many values shows a step, not a trend."""
_FIRST_STEPS = 2
"""Values that are left out, because the optimizer's state arrives with them."""
# "Alone": the log has no failure. It needs more growth than a log that ends in one.
_LEAST_VALUES_ALONE = 9
_LEAST_VALUES_OF_STEPS = 4
_LEAST_SHARE_ALONE = 0.3
"""Smallest growth, as a share of the first value."""
_LEAST_TAU_ALONE = 0.7
"""Smallest Kendall's tau of memory in tensors. Values with few digits are often equal."""
_LEAST_TAU_UNNAMED = 0.9
"""The same if the kind of GPU memory is unknown."""
_LEAST_TAU_OF_LENGTHS = 0.6
"""Smallest Kendall's tau with which sequences become longer."""
_MOST_LENGTHS = 128
_OF_STEPS = re.compile(r"step|iter|epoch|batch", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PastGrowth:
    """Memory that grew."""

    trend: Trend

    unit: str
    """Work between two values: `micro-batch`, `step`, or `sample` if the log does not name steps."""

    steps: int = 0
    """Steps between the first and the last value, which need not be consecutive; 0 if they are not named."""

    @property
    def per_unit_bytes(self) -> int:
        """Growth for each unit of work, on average."""
        return self.trend.growth_bytes // self.steps if self.steps else self.trend.mean_growth_bytes


def allocated_growth(series: MemorySeries) -> PastGrowth | None:
    """Growth of memory in tensors: over the micro-batches of the latest step, else over the same phase of the steps.

    The first micro-batch is left out: it creates the gradients. A maximum, or memory that is not known to be in
    tensors, must still grow at the end: torch's cache and a maximum over batches of random length settle. Memory that
    grows with the length of the sequences is no leak.
    """
    if _grows_with_its_sequences(series):
        return None
    micro_batches = [sample for sample in series.samples if sample.micro_batch is not None]
    if micro_batches:
        latest = [sample.allocated_bytes for sample in micro_batches if sample.step == micro_batches[-1].step]
        if trend := past_growth(latest[1:]):
            return PastGrowth(trend, "micro-batch")
    growth = _growth_over_steps(series, lambda sample: sample.allocated_bytes) or _growth_of_few(series)
    if (
        growth
        and growth.trend.values >= _LEAST_VALUES_ALONE - _FIRST_STEPS
        and (series.is_peak or series.measure is not Measure.TENSORS)
    ):
        values = [sample.allocated_bytes for sample in series.samples]
        return growth if still_grows(values[_FIRST_STEPS:]) else None
    return growth


def host_growth(evidence_series: Sequence[MemorySeries]) -> tuple[MemorySeries, PastGrowth] | None:
    """The growth of host memory in figures that a program prints, the largest one."""
    found = [
        (series, growth)
        for series in evidence_series
        if series.measure is Measure.HOST and (growth := _growth_over_steps(series, lambda sample: sample.rss_bytes))
    ]
    return max(found, key=lambda pair: pair[1].trend.growth_bytes, default=None)


def large_growth(series: MemorySeries) -> tuple[int, int] | None:
    """The median of the first and of the last third of the values of memory in tensors, if it grew by 30 % and 1 GiB.

    Nearly all changes must be growth. The first two values are left out: the optimizer's state arrives with them. None
    for a series whose lines do not name their point of the work. A few values suffice if their lines name a step:
    then they were taken at the same point of the work, and none of them may be less than the one before.
    """
    values = [sample.allocated_bytes for sample in series.samples][_FIRST_STEPS:]
    if _grows_with_its_sequences(series):
        return None
    if len(values) < (_LEAST_VALUES_OF_STEPS if _is_of_steps(series) else _LEAST_VALUES_ALONE):
        return None
    if not series.name or (len(values) < _LEAST_VALUES_ALONE and values != sorted(values)):
        return None
    third = len(values) // 3
    first, last = round(median(values[:third])), round(median(values[-third:]))
    if last - first < max(GIB, _LEAST_SHARE_ALONE * first):
        return None
    changes = [later - earlier for earlier, later in combinations(values, 2) if later != earlier]
    tau = sum(1 if change > 0 else -1 for change in changes) / len(changes)
    if series.measure is Measure.TENSORS:
        return (first, last) if tau >= _LEAST_TAU_ALONE else None
    if series.is_peak or series.measure is not Measure.GPU or tau < _LEAST_TAU_UNNAMED:
        return None
    return (first, last) if len(values) < _LEAST_VALUES_ALONE or still_grows(values) else None


def reserved_growth(series: MemorySeries) -> PastGrowth | None:
    """Growth of the memory that torch's allocator holds, over the steps."""
    return _growth_over_steps(series, lambda sample: None if sample.cache_bytes is None else sample.reserved_bytes)


def cache_growth(evidence_series: Sequence[MemorySeries]) -> PastGrowth | None:
    """Growth of the memory that the policy's torch reserves while its tensors do not grow: cache, or pieces of free
    memory."""
    for series in evidence_series:
        found = reserved_growth(series) if series.is_policy else None
        if found and not allocated_growth(series):
            return found
    return None


def _growth_of_few(series: MemorySeries) -> PastGrowth | None:
    """A large growth at every one of a few steps, which are too few for a trend."""
    samples = series.samples[_FIRST_STEPS:]
    values = [sample.allocated_bytes for sample in samples]
    if len(values) >= _LEAST_VALUES_ALONE or series.is_peak:
        return None
    if any(sample.step is None or sample.phase is not None for sample in samples):
        return None  # Phases of a step hold more than others.
    if large_growth(series) is None or len(set(values)) < len(values):
        return None
    trend = Trend(values[0], values[-1], len(values), theil_sen_slope(values), is_firm=False)
    return PastGrowth(trend, *_unit_of(samples))


def _unit_of(samples: Sequence[MemorySample]) -> tuple[str, int]:
    """The unit of work between the samples, and the number of steps from first to last if they name theirs."""
    first, last = samples[0].step, samples[-1].step
    if first is None or last is None:
        return "sample", 0
    return "step", max(last - first, 0)


def _is_of_steps(series: MemorySeries) -> bool:
    """True if the name of the series mentions steps, or each line has a different step."""
    steps = {sample.step for sample in series.samples if sample.step is not None}
    return bool(_OF_STEPS.search(series.name)) or len(steps) == len(series.samples)


def _grows_with_its_sequences(series: MemorySeries) -> bool:
    lengths = series.lengths[-_MOST_LENGTHS:]
    return len(lengths) > _FEW_VALUES and kendall_tau([round(length) for length in lengths]) >= _LEAST_TAU_OF_LENGTHS


def _growth_over_steps(series: MemorySeries, size: Callable[[MemorySample], int | None]) -> PastGrowth | None:
    by_phase: dict[str | None, list[MemorySample]] = defaultdict(list)
    for sample in series.samples:
        if sample.micro_batch is None:
            by_phase[sample.phase].append(sample)
    found = []
    for samples in by_phase.values():
        values = [value for sample in samples if (value := size(sample)) is not None]
        if trend := past_growth(values):
            found.append(PastGrowth(trend, *_unit_of(samples[-trend.values :])))
    return max(found, key=lambda growth: growth.trend.growth_bytes, default=None)
