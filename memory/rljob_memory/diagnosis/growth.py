"""Growth of a process's memory before its failure, over samples at comparable points of its work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from rljob_memory.evidence.collected import MemorySeries
from rljob_memory.sample import MemorySample
from rljob_memory.trend import Trend, past_growth


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
