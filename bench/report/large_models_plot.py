"""Figure of full fine-tuning on one GPU: seconds per step and peak GPU memory by phase, bars for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import style
from matplotlib.axes import Axes

from bench.report.markdown import GIB, Row
from rljob_trainer.plot.style import INK, STYLE, label_right, phase_colour, stacked_figure

MODELS = {"0.6b": "0.6B", "4b": "4B", "8b": "8B", "14b": "14B"}
"""Arms that are drawn, in this order, and their labels."""
_ROLE = {"rollout": "rollout", "update": "policy", "sync": "policy"}
"""Phases that have a bar of memory, and the role that works in each. In a sync, the policy is the larger one."""
_BAR = 0.24
_SECONDS_BAR = 0.56
_NEGLIGIBLE_SHARE = 0.005


def draw(rows: Sequence[Row], device: str, settings: Mapping[str, str], path: Path) -> None:
    """Write the figure as PNG. An arm without steps after the warm-up is left out, and so is what an older row lacks:
    all memory but that of the update. `settings`: lines below the label of each arm.
    """
    found = {row["arm"]: row for row in rows if "seconds_by_phase" in row}
    arms = [found[arm] for arm in MODELS if arm in found]
    with style.context([STYLE, {"figure.figsize": (9.0, 5.6)}]):
        figure, [seconds, memory] = stacked_figure(
            "Full fine-tuning on one GPU, by model and phase",
            f"Qwen3's shapes with random weights, all of them trained, 128 responses a step, one {device}.",
            rows=2,
        )
        for axes in (seconds, memory):
            axes.set_xlim(-0.5, len(arms) - 0.5)
            axes.tick_params(axis="x", labelcolor=INK)
        seconds.set_xticks(range(len(arms)), [MODELS[arm["arm"]] for arm in arms])
        memory.set_xticks(range(len(arms)), [f"{MODELS[arm['arm']]}\n{_below(arm, settings)}" for arm in arms])
        seconds.set_title("Seconds per step, median", loc="left", fontsize=12, color=INK)
        memory.set_title("Peak GPU memory, GiB", loc="left", fontsize=12, color=INK)
        _draw_seconds(seconds, arms)
        _draw_memory(memory, arms)
        figure.savefig(path)


def _below(arm: Row, settings: Mapping[str, str]) -> str:
    return f"{settings[arm['arm']]}\noptimizer: {'host' if arm['plan']['optimizerOffload'] else 'GPU'}"


def _draw_seconds(axes: Axes, arms: Sequence[Row]) -> None:
    """Phases stacked, with the seconds of the whole step above. The last bar's phases are named beside it."""
    highest = max(arm["seconds_per_step"] for arm in arms)
    axes.set_ylim(0, 1.12 * highest)
    for position, arm in enumerate(arms):
        base, labels = 0.0, []
        for phase, seconds in _noticeable(arm["seconds_by_phase"]).items():
            axes.bar(position, seconds, _SECONDS_BAR, bottom=base, color=phase_colour(phase))
            labels.append((phase, base + seconds / 2, phase_colour(phase)))
            if seconds > 0.06 * highest:
                _write(axes, position, base + seconds / 2, f"{seconds:.1f}", "white", above=False)
            base += seconds
        _write(axes, position, base, f"{arm['seconds_per_step']:.1f} s", INK)
    label_right(axes, labels)


def _noticeable(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values())
    return {phase: value for phase, value in seconds.items() if value >= _NEGLIGIBLE_SHARE * whole}


def _draw_memory(axes: Axes, arms: Sequence[Row]) -> None:
    """A bar for each phase, and a line over each group at the peak of the whole run, its start-up included.

    Full colour: the process that works. Pale, up to the peak of the GPU in that phase: everything else on it.
    """
    axes.set_xlabel(
        "Bars: rollout, update, sync. Full: torch in the process that works (sync: policy). "
        "Pale: the whole GPU.\nLine: the whole GPU during the run.",
        fontsize=10,
        labelpad=10,
    )
    axes.set_ylim(0, 1.12 * max(arm["device_peak_bytes"] for arm in arms) / GIB)
    for position, arm in enumerate(arms):
        older = {"policy": {"update": arm["torch_peak_reserved_bytes"]}}
        by_role, on_device = arm.get("peak_bytes_by_phase", older), arm.get("device_peak_bytes_by_phase", {})
        for number, (phase, role) in enumerate(_ROLE.items()):
            place = position + (number - 1) * _BAR
            of_role = by_role.get(role, {}).get(phase, 0) / GIB
            axes.bar(place, on_device.get(phase, 0) / GIB, 0.9 * _BAR, color=phase_colour(phase), alpha=0.3)
            axes.bar(place, of_role, 0.9 * _BAR, color=phase_colour(phase))
            if of_role > 0.06 * axes.get_ylim()[1]:
                _write(axes, place, of_role / 2, f"{of_role:.0f}", "white", above=False)
        whole = arm["device_peak_bytes"] / GIB
        axes.hlines(whole, position - 1.6 * _BAR, position + 1.6 * _BAR, color=INK, linewidth=1.6)
        _write(axes, position, whole, f"{whole:.0f} GiB", INK)


def _write(axes: Axes, x: float, y: float, text: str, colour: str, *, above: bool = True) -> None:
    """`text` above the point, or in its place."""
    axes.annotate(
        text,
        (x, y),
        xytext=(0, 3 if above else 0),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "center",
        color=colour,
        fontsize=10,
    )
