"""Peak memory of a run by role, phase and step, from the memory logs of its processes or else from the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rljob_client.run_directory.memory_logs import logged_samples
from rljob_client.run_directory.records import StepRecord, role_of
from rljob_memory.sample import MemorySample

Peaks = dict[str, dict[str, dict[int, int]]]
"""role → phase → step → bytes"""


@dataclass(frozen=True, slots=True)
class MemoryPeaks:
    """Peak memory of a run."""

    by_role: Peaks

    counts: Literal["device", "host"]
    """`device`: memory that torch's allocator reserved on a GPU. `host`: resident memory."""

    device_total_bytes: int = 0
    """Memory of one GPU; 0 if the run used none or did not record it."""


def memory_peaks(directory: Path, steps: Sequence[StepRecord]) -> MemoryPeaks:
    """The highest sample of each role, phase and step over its ranks and micro-batches.

    `directory`: of the logs `<role>-<rank>.jsonl`. If they hold nothing, the peaks of the committed `steps` count.
    """
    samples = list(logged_samples(directory))
    if not samples:
        return _from_ledger(steps)
    device_total_bytes = max(sample.device_total_bytes for _, sample in samples)
    peaks: Peaks = defaultdict(lambda: defaultdict(dict))
    for actor, sample in samples:
        if sample.phase is None or sample.step is None:
            continue
        by_step = peaks[role_of(actor)][sample.phase]
        peak_bytes = _device_peak_bytes(sample) if device_total_bytes else max(sample.peak_rss_bytes, sample.rss_bytes)
        by_step[sample.step] = max(by_step.get(sample.step, 0), peak_bytes)
    return MemoryPeaks(peaks, "device" if device_total_bytes else "host", device_total_bytes)


def _device_peak_bytes(sample: MemorySample) -> int:
    # torch still counts what a sleeping engine has given back.
    return max(sample.peak_reserved_bytes, sample.reserved_bytes) - sample.asleep_bytes


def _from_ledger(steps: Sequence[StepRecord]) -> MemoryPeaks:
    peaks: Peaks = defaultdict(lambda: defaultdict(dict))
    for step in steps:
        for actor, phases in step.memory_bytes.items():
            for phase, size_bytes in phases.items():
                by_step = peaks[role_of(actor)][phase]
                by_step[step.step] = max(by_step.get(step.step, 0), size_bytes)
    return MemoryPeaks(peaks, steps[-1].memory_counts)
