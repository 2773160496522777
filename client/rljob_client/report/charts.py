"""The charts of the steps, as figures of plotly.js: learning curves, seconds by phase, memory by phase."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from statistics import fmean
from typing import Any

from rljob_client.run_directory.records import PHASES, EvaluationRecord, StepRecord, role_of
from rljob_client.run_directory.reward_trend import window_steps
from rljob_memory.sizes import GIB

MOST_POINTS = 5000
"""Points of a line. Of a longer one, the highest and the lowest value of each stretch are drawn."""
_MOST_BARS = 300
_LONGEST_WINDOW_STEPS = 51
_SHARE = "share"
_SMALL_SHARE = 0.2
"""Shares above it are drawn on an axis from 0 to 1."""
_BETWEEN = "between phases"

COLORS = ("#3b8fd4", "#e0742c", "#2ca58d", "#cc79a7", "#d9a400", "#8d79c7")
"""Distinguishable with color blindness, on light and on dark ground. Source: after Okabe and Ito, Color Universal
Design (2008)."""
PHASE_COLORS = {
    "rollout": "#3b8fd4",
    "reward": "#cc79a7",
    "update": "#e0742c",
    "sync": "#2ca58d",
    "checkpoint": "#d9a400",
    "load": "#7f8c8d",
}
OTHER_COLOR = "#8a949e"

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of plotly.js with its heading."""

    title: str
    note: str
    """Explanation below the title; may be empty."""

    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    is_wide: bool = False
    """It takes the whole width of the page."""

    height: int = 240
    """Pixels."""


_PANELS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("Loss", "", {"loss": "loss"}),
    ("Entropy", "nats per token", {"entropy": "entropy"}),
    ("KL divergence", "nats", {"ppo_kl": "within the step", "kl": "from the initial model"}),
    ("Clip fraction", _SHARE, {"clip_fraction_low": "low", "clip_fraction_high": "high", "clip_fraction_dual": "dual"}),
    ("Gradient norm", "before clipping", {"grad_norm": "norm"}),
    ("Response length", "tokens", {"mean_tokens": "mean", "max_tokens": "longest"}),
    ("Truncated responses", _SHARE, {"clipped_ratio": "truncated"}),
    ("Uniform groups", _SHARE, {"uniform_groups": "uniform"}),
    ("Importance weights", "weight", {"importance_weight_mean": "mean", "importance_weight_max": "largest"}),
    ("Effective sample size", _SHARE, {"importance_ess": "share"}),
    ("Learning rate", "", {"learning_rate": "rate"}),
)
"""Title, unit, and lines: the label of each value of a step. Values that a run does not have are left out."""


def learning_charts(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> list[Chart]:
    """The reward with the evaluations, then one small chart per quantity."""
    of_steps = [{**step.metrics, **step.response.model_dump()} for step in steps]
    numbers = [step.step for step in steps]
    panels = [*_PANELS, *((f"Reward {name.partition('/')[2]}", "", {name: "mean"}) for name in _reward_names(steps))]
    charts = [_reward_chart(steps, evaluations)] if steps or evaluations else []
    for title, unit, labels in panels:
        found = {label: [each.get(name) for each in of_steps] for name, label in labels.items()}
        lines = {label: values for label, values in found.items() if any(value is not None for value in values)}
        if lines:
            charts.append(_lines_chart(title, unit, numbers, lines))
    at = [record.step for record in evaluations]
    for name in dict.fromkeys(name for record in evaluations for name in record.metrics):
        values = {name: [record.metrics.get(name) for record in evaluations]}
        charts.append(_lines_chart(f"Evaluation: {name}", "", at, values, mode="lines+markers"))
    return charts


def _reward_names(steps: Sequence[StepRecord]) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in step.metrics if name.startswith("rewards/")))


def _reward_chart(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> Chart:
    """Mean reward of each step as dots, running mean as a line, and mean ± std of the same steps as a band."""
    finite = [step for step in steps if math.isfinite(step.reward.mean) and math.isfinite(step.reward.std)]
    numbers, window = [step.step for step in finite], running_window(len(finite))
    smooth = running_mean([step.reward.mean for step in finite], window)
    spread = running_mean([step.reward.std for step in finite], window)
    low = min((step.reward.min for step in finite), default=0.0)
    high = max((step.reward.max for step in finite), default=0.0)
    edges = {
        "lower": [max(mean - std, low) for mean, std in zip(smooth, spread, strict=True)],
        "upper": [min(mean + std, high) for mean, std in zip(smooth, spread, strict=True)],
    }
    every = -(-len(numbers) // MOST_POINTS) or 1
    band = [
        {
            **{"x": numbers[::every], "y": rounded(edge[::every]), "mode": "lines", "line": {"width": 0}},
            **{"hoverinfo": "skip", "showlegend": False, "fillcolor": "rgba(59,143,212,0.18)"},
            "fill": "tonexty" if name == "upper" else "none",
        }
        for name, edge in edges.items()
    ]
    mean = f"mean of {window} steps" if window > 1 else "mean"
    traces = [
        *band,
        _line("step", numbers, [step.reward.mean for step in finite], 0, mode="markers", opacity=0.45),
        _line(mean, numbers, smooth, 0),
    ]
    if measured := [record for record in evaluations if "reward_mean" in record.metrics]:
        values = [record.metrics["reward_mean"] for record in measured]
        traces.append(_line("evaluation", [each.step for each in measured], values, 1, mode="lines+markers"))
    left_out = len(steps) - len(finite)
    note = f"Band: ± mean standard deviation of a step, cut at min and max.{_not_finite(left_out)}{_thinned(numbers)}"
    return Chart("Reward", note, traces, _axes(legend=True), is_wide=True, height=320)


def running_window(steps: int) -> int:
    """The window of the reward's trend; in long runs a twentieth of the run, but at most 51 steps."""
    return max(window_steps(steps), min(_LONGEST_WINDOW_STEPS, steps // 20))


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """For each value, the mean of the last `window` values; of fewer at the start. [steps] → [steps]."""
    sums = [0.0, *accumulate(values)]
    return [(sums[end] - sums[max(end - window, 0)]) / min(end, window) for end in range(1, len(sums))]


def _lines_chart(
    title: str, unit: str, numbers: Sequence[int], lines: Mapping[str, Values], mode: str = "lines"
) -> Chart:
    mode = mode if len(numbers) > 2 else "lines+markers"
    traces = [_line(label, numbers, values, index, mode=mode) for index, (label, values) in enumerate(lines.items())]
    count = max(sum(value is not None and not math.isfinite(value) for value in values) for values in lines.values())
    layout = _axes(legend=len(lines) > 1)
    if unit == _SHARE:
        is_large = any(value is not None and value > _SMALL_SHARE for values in lines.values() for value in values)
        layout["yaxis"] |= {"range": [-0.02, 1.05]} if is_large else {"rangemode": "tozero"}
    return Chart(title, f"{unit}.{_not_finite(count)}{_thinned(numbers)}".removeprefix(".").strip(), traces, layout)


def _not_finite(count: int) -> str:
    return f" NaN or infinite in {count} steps, which are gaps." if count else ""


def _thinned(points: Sequence[object]) -> str:
    if len(points) <= MOST_POINTS:
        return ""
    return f" {len(points):,} points, drawn by the highest and the lowest of each {-(-2 * len(points) // MOST_POINTS)}."


def _axes(unit: str = "", *, legend: bool = False) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": unit}}, "showlegend": legend}


def _line(
    name: str, xs: Sequence[float], ys: Values, color: int, *, mode: str = "lines", **more: Any
) -> dict[str, Any]:
    xs, ys = thinned(xs, ys)
    # plotly.js reads tags and entities in names.
    look = {"line": {"color": COLORS[color % len(COLORS)], "width": 2}, "marker": {"color": COLORS[color], "size": 5}}
    return {"name": escape(name), "x": list(xs), "y": rounded(ys), "mode": mode, **look, **more}


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def rounded(values: Values) -> list[float | None]:
    """Six significant digits. Values that are no finite number are gaps: JSON has no NaN."""
    return [float(f"{value:.6g}") if value is not None and math.isfinite(value) else None for value in values]


def thinned(xs: Sequence[float], ys: Values) -> tuple[Sequence[float], Values]:
    """At most `MOST_POINTS` points: the lowest and the highest of each stretch, in their order."""
    if len(xs) <= MOST_POINTS:
        return xs, ys
    size = -(-2 * len(xs) // MOST_POINTS)
    kept: list[int] = []
    for begin in range(0, len(xs), size):
        stretch = [index for index in range(begin, min(begin + size, len(xs))) if is_finite(ys[index])]
        ordered = sorted(stretch, key=lambda index: ys[index] or 0.0) or [begin]
        kept += sorted({ordered[0], ordered[-1]})
    return [xs[index] for index in kept], [ys[index] for index in kept]


# --- seconds ---


def seconds_chart(steps: Sequence[StepRecord]) -> Chart:
    """The phases of each step, stacked up to its wall time."""
    width = -(-len(steps) // _MOST_BARS)
    middles = [fmean(step.step for step in part) for part in _parts(steps, width)]
    traces = [
        {"type": "bar", "name": phase, "x": middles, "y": rounded([fmean(part) for part in _parts(values, width)])}
        | {"width": width, "marker": {"color": PHASE_COLORS.get(phase, OTHER_COLOR), "line": {"width": 0}}}
        for phase, values in seconds_by_phase(steps).items()
    ]
    note = "Seconds of each step." if width == 1 else f"Mean seconds of {width} steps each."
    note += f" {_BETWEEN.capitalize()} is the rest of the wall time, including recoveries."
    layout = _axes("seconds", legend=True) | {"barmode": "stack", "bargap": 0}
    return Chart("Seconds by phase", note, traces, layout, is_wide=True, height=300)


def _parts(values: Sequence[Any], width: int) -> list[Sequence[Any]]:
    return [values[begin : begin + width] for begin in range(0, len(values), width)]


def seconds_by_phase(steps: Sequence[StepRecord]) -> dict[str, list[float]]:
    """Seconds by step, [steps], for each phase that took time. They add up to the wall time."""
    columns = {phase: [step.seconds.get(phase, 0.0) for step in steps] for phase in PHASES}
    columns[_BETWEEN] = [
        max(0.0, step.total_seconds - sum(step.seconds.get(phase, 0.0) for phase in PHASES)) for step in steps
    ]
    return {phase: values for phase, values in columns.items() if any(values)}


# --- memory by phase ---


def peak_charts(steps: Sequence[StepRecord]) -> list[Chart]:
    """For each role, the peak of each phase over the steps, on the rank with the highest."""
    peaks: dict[str, dict[str, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for step in steps:
        for actor, phases in step.memory_bytes.items():
            for phase, size_bytes in phases.items():
                by_step = peaks[role_of(actor)][phase]
                by_step[step.step] = max(by_step.get(step.step, 0), size_bytes)
    counted = {"device": "reserved by torch on one GPU", "host": "resident host memory of one process"}
    return [
        Chart(
            f"Peak memory by phase: {role}",
            f"GiB {counted[steps[-1].memory_counts]}; the highest rank.{_thinned(steps)}",
            [
                _line(phase, list(by_step), [size / GIB for size in by_step.values()], 0, mode="lines+markers")
                | {"line": {"color": PHASE_COLORS.get(phase, OTHER_COLOR)}}
                | {"marker": {"color": PHASE_COLORS.get(phase, OTHER_COLOR), "size": 3}}
                for phase, by_step in phases.items()
            ],
            _axes(legend=True) | {"yaxis": {"rangemode": "tozero"}},
        )
        for role, phases in sorted(peaks.items())
    ]
