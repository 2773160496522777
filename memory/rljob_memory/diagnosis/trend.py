"""Whether memory rises over the samples of one process, at comparable points of its work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from rljob_memory.estimate import MIB
from rljob_memory.evidence.evidence import MemorySample, MemorySeries

_LEAST_SAMPLES = 8
_MOST_SAMPLES = 128
_LEAST_TAU = 0.8
_LEAST_GROWTH_BYTES = 256 * MIB
_LEAST_GROWTH_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Rise:
    """`first`, `last`: bytes. `samples`: how many were compared, one a `unit` (micro-batch, step or sample)."""

    first_bytes: int
    last_bytes: int
    samples: int
    unit: str

    @property
    def growth_bytes(self) -> int:
        return self.last_bytes - self.first_bytes

    @property
    def bytes_a_unit(self) -> int:
        return self.growth_bytes // (self.samples - 1)


def rise(values: Sequence[int], unit: str) -> Rise | None:
    """The rise of `values`, where there is one.

    At least 8 of them, Kendall's tau of 0.8 with their order (nine pairs in ten rise), and a growth of 256 MiB and 5 %:
    batches of random length come no nearer to that than one time in a thousand (8 values, tau ≥ 0.8: p = 0.0009).
    """
    values = values[-_MOST_SAMPLES:]
    if len(values) < _LEAST_SAMPLES:
        return None
    pairs = list(combinations(values, 2))
    tau = sum((later > earlier) - (later < earlier) for earlier, later in pairs) / len(pairs)
    growth = values[-1] - values[0]
    if tau < _LEAST_TAU or growth < max(_LEAST_GROWTH_BYTES, _LEAST_GROWTH_SHARE * values[0]):
        return None
    return Rise(values[0], values[-1], len(values), unit)


def allocated_rise(series: MemorySeries) -> Rise | None:
    """Of memory in tensors: over the micro-batches of the latest step, else over the steps' same phase.

    The first micro-batch is left out: it makes the gradients.
    """
    micro_batches = [sample for sample in series.samples if sample.micro_batch is not None]
    if micro_batches:
        latest = [sample.allocated_bytes for sample in micro_batches if sample.step == micro_batches[-1].step]
        if found := rise(latest[1:], "micro-batch"):
            return found
    return _rise_over_steps(series, "allocated_bytes")


def reserved_rise(series: MemorySeries) -> Rise | None:
    """Of what torch's allocator holds, over the steps."""
    return _rise_over_steps(series, "reserved_bytes")


def _rise_over_steps(series: MemorySeries, attribute: str) -> Rise | None:
    by_phase: dict[str | None, list[MemorySample]] = defaultdict(list)
    for sample in series.samples:
        if sample.micro_batch is None:
            by_phase[sample.phase].append(sample)
    rises = []
    for samples in by_phase.values():
        values = [value for sample in samples if (value := getattr(sample, attribute)) is not None]
        unit = "step" if samples[0].step is not None else "sample"
        if found := rise(values, unit):
            rises.append(found)
    return max(rises, key=lambda found: found.growth_bytes, default=None)
