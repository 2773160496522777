"""The peaks of a run's memory, by role, phase and step, from the processes' own logs or else from the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rljob_trainer.ledger.records import StepRecord, role_of
from rljob_trainer.plot.memory_logs import logged_samples

Peaks = dict[str, dict[str, dict[int, int]]]
"""role → phase → step → bytes"""


@dataclass(frozen=True, slots=True)
class MemoryPeaks:
    """`counts`: `device` is what torch's allocator reserved on a GPU, `host` resident memory.

    `device_total_bytes`: of one GPU, 0 where the run used none or did not say.
    """

    by_role: Peaks
    counts: Literal["device", "host"]
    device_total_bytes: int = 0


def memory_peaks(directory: Path, steps: Sequence[StepRecord]) -> MemoryPeaks:
    """The highest sample of each role, phase and step over its ranks and micro-batches.

    `directory`: of the logs `<role>-<rank>.jsonl`; where they hold nothing, the committed `steps` tell.
    """
    samples = list(logged_samples(directory))
    if not samples:
        return _from_ledger(steps)
    device_total_bytes = max(sample.get("device_total", 0) for _, sample in samples)
    keys = ("peak_reserved", "reserved") if device_total_bytes else ("peak_rss", "rss")
    peaks: Peaks = defaultdict(lambda: defaultdict(dict))
    for actor, sample in samples:
        by_step = peaks[role_of(actor)][sample["phase"]]
        # What a sleeping engine has given back, torch still counts.
        asleep_bytes = sample.get("asleep", 0) if device_total_bytes else 0
        size_bytes = max(*(sample.get(key, 0) for key in keys)) - asleep_bytes
        by_step[sample["step"]] = max(by_step.get(sample["step"], 0), size_bytes)
    return MemoryPeaks(peaks, "device" if device_total_bytes else "host", device_total_bytes)


def _from_ledger(steps: Sequence[StepRecord]) -> MemoryPeaks:
    peaks: Peaks = defaultdict(lambda: defaultdict(dict))
    for step in steps:
        for actor, phases in step.memory_bytes.items():
            for phase, size_bytes in phases.items():
                by_step = peaks[role_of(actor)][phase]
                by_step[step.step] = max(by_step.get(step.step, 0), size_bytes)
    return MemoryPeaks(peaks, steps[-1].memory_counts)
