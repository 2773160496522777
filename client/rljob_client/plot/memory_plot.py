"""Peak memory of each phase over the steps, one panel per role: which phase needs it, and does it grow?"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rljob_client.plot.style import (
    GIB,
    INK,
    MUTED,
    draw_limit,
    label_right,
    merge_lines,
    phase_color,
    step_axis,
    titled_figure,
)
from rljob_client.run_directory.memory_logs import logged_samples
from rljob_client.run_directory.records import PHASES, StepRecord, role_of
from rljob_memory.sample import MemorySample

_ROLE_ORDER = ("policy", "rollout", "controller")
_COUNTED = {
    "device": "reserved by torch's allocator on one GPU",
    "host": "resident host memory of one process",
}
_SAME_LINE = 0.005
"""Distance below which two lines look like one, as a share of the axis's height."""
_LABEL_WIDTH = 16


def draw_memory(peaks: MemoryPeaks) -> Figure:
    """One line per phase, in GiB, or per group of phases with the same peaks. The size of the GPU is drawn if the lines
    come near it."""
    roles = sorted(peaks.by_role, key=lambda role: (role not in _ROLE_ORDER, role))
    highest, role, phase = max(
        (max(by_step.values()), role, phase) for role in roles for phase, by_step in peaks.by_role[role].items()
    )
    figure, panels = titled_figure(
        f"Memory peaked at {_shown(highest / GIB)} GiB, in the {role} process during {phase}",
        f"Peak of each phase in each step: {_COUNTED[peaks.counts]}, the highest rank. Numbers: latest.",
        panels=len(roles),
    )
    near_limit = highest > 0.5 * peaks.device_total_bytes > 0
    for axes, name in zip(panels, roles, strict=True):
        axes.set_title(name, loc="left", fontsize=12, color=INK)
        axes.set_ylim(0, 1.08 * max(highest, peaks.device_total_bytes if near_limit else 0) / GIB)
        _draw_role(axes, peaks.by_role[name])
        if near_limit:
            draw_limit(axes, "the GPU", peaks.device_total_bytes / GIB)
        axes.set_ylabel("GiB")
    return figure


def _draw_role(axes: Axes, phases: dict[str, dict[int, int]]) -> None:
    steps = sorted({step for by_step in phases.values() for step in by_step})
    lines = {
        phase: np.array([phases[phase].get(step, np.nan) for step in steps]) / GIB
        for phase in sorted(phases, key=_phase_order)
    }
    labels = []
    for names, gib in merge_lines(lines, _SAME_LINE * axes.get_ylim()[1]):
        color = phase_color(names[0]) if len(names) == 1 else MUTED
        measured = np.isfinite(gib)  # a checkpoint is not in every step
        points = int(measured.sum())
        axes.plot(
            np.array(steps)[measured],
            gib[measured],
            color=color,
            linewidth=2,
            marker="o" if points == 1 else None,  # a lone step has no line
            clip_on=False,
        )
        latest = float(gib[measured][-1])
        label = textwrap.fill(", ".join(names), _LABEL_WIDTH)
        labels.append((f"{label}  {_shown(latest)}", latest, color))
    step_axis(axes, steps[0], steps[-1])
    label_right(axes, labels)


def _shown(gib: float) -> str:
    return f"{gib:.1f}" if gib >= 10 else f"{gib:.2f}"


def _phase_order(phase: str) -> tuple[int, str]:
    return (PHASES.index(phase) if phase in PHASES else len(PHASES), phase)


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

    `directory`: that of the logs `<role>-<rank>.jsonl`. If they hold nothing, the peaks of the committed `steps` count.
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
