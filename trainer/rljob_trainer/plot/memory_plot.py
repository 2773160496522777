"""Peak memory of each phase over the steps, one panel per role: which phase needs it, and does it grow?"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rljob_trainer.ledger.records import PHASES
from rljob_trainer.plot.memory_samples import MemoryPeaks
from rljob_trainer.plot.style import GIB, INK, draw_limit, label_right, phase_colour, step_axis, titled_figure

_ROLE_ORDER = ("policy", "rollout", "controller")
_COUNTED = {
    "device": "reserved by torch's allocator on one GPU",
    "host": "resident host memory of one process",
}


def draw_memory(peaks: MemoryPeaks) -> Figure:
    """One line per phase, in GiB; the size of the GPU is drawn if the lines come near it."""
    roles = sorted(peaks.by_role, key=lambda role: (role not in _ROLE_ORDER, role))
    highest, role, phase = max(
        (max(by_step.values()), role, phase) for role in roles for phase, by_step in peaks.by_role[role].items()
    )
    figure, panels = titled_figure(
        f"Memory peaked at {_shown(highest / GIB)} GiB, in the {role}'s {phase} phase",
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
    panels[0].set_ylabel("GiB")
    return figure


def _draw_role(axes: Axes, phases: dict[str, dict[int, int]]) -> None:
    labels = []
    for phase in sorted(phases, key=_phase_order):
        steps = sorted(phases[phase])
        gib = [phases[phase][step] / GIB for step in steps]
        # A lone step has no line.
        axes.plot(steps, gib, color=phase_colour(phase), linewidth=2, marker="o" if len(steps) == 1 else None)
        labels.append((f"{phase}  {_shown(gib[-1])}", gib[-1], phase_colour(phase)))
    every_step = [step for by_step in phases.values() for step in by_step]
    step_axis(axes, min(every_step), max(every_step))
    label_right(axes, labels)


def _shown(gib: float) -> str:
    return f"{gib:.1f}" if gib >= 10 else f"{gib:.2f}"


def _phase_order(phase: str) -> tuple[int, str]:
    return (PHASES.index(phase) if phase in PHASES else len(PHASES), phase)
