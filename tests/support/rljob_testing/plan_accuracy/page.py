"""The tables and the plot of docs/sizing.md and docs/other-trainers.md, from the recorded results."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rljob_testing.plan_accuracy.errors import PHASES, Row, compared_again, has_held, statistics_of
from rljob_testing.repository import ROOT

RESULTS = [ROOT / "bench" / "results" / folder / "plan_accuracy.json" for folder in ("", "h200")]
"""Results on H100s, and on H200s."""
PAGE, PLOT = ROOT / "docs" / "sizing.md", ROOT / "docs" / "plan-accuracy.svg"
TRL_RESULT, TRL_PAGE = ROOT / "bench" / "results" / "trl_accuracy.json", ROOT / "docs" / "other-trainers.md"
END = "<!-- end -->\n"

_GIB, _LINE_END = 2**30, "\n"
_TRL_OPTIONS = (
    "dtype",
    "lora_r",
    "beta",
    "per_device_train_batch_size",
    "max_completion_length",
    "gradient_checkpointing",
    "vllm_enable_sleep_mode",
    "vllm_gpu_memory_utilization",
)
_MOST_RATIO = 1.7
"""Larger ratios of predicted to measured are drawn here, with their value."""
_VALUES = {
    "memory": "GPU and host, all phases",
    "gpu": "GPU, all phases",
    "gpu, rollout": "GPU, rollout",
    "gpu, update": "GPU, update",
    "gpu, sync": "GPU, sync",
    "host, rollout": "host, engine's process",
    "host, update": "host, policy's process",
    "step_seconds": "seconds of a step",
}


def rows() -> list[Row]:
    """The rows of all results, those that were drawn first."""
    found = [row for file in RESULTS if file.exists() for row in json.loads(file.read_text())["rows"]]
    return sorted(found, key=lambda row: not row["drawn"])


def pages() -> dict[Path, str]:
    """The text of the pages, with what stands between their marks replaced."""
    trl = json.loads(TRL_RESULT.read_text())["rows"] if TRL_RESULT.exists() else []
    return {
        PAGE: _between_marks(PAGE, "plan_accuracy", _lines(rows())),
        TRL_PAGE: _between_marks(TRL_PAGE, "trl_accuracy", _trl_lines(trl)),
    }


def _between_marks(page: Path, result: str, lines: Iterator[str]) -> str:
    mark = f"<!-- from bench/results/{result}.json -->\n"
    before, begin, rest = page.read_text(encoding="utf-8").partition(mark)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"expected the marks {mark.strip()} and {END.strip()} in {page}, found none")
    return f"{before}{begin}{''.join(line + _LINE_END for line in lines)}{end}{after}"


def _trl_lines(found: Sequence[Row]) -> Iterator[str]:
    if not found:
        return
    yield "| options | rollout, GiB | update, GiB | sync, GiB | verdict; steps that ran |"
    yield "|---|---|---|---|---|"
    for row in found:
        options = ", ".join(f"`{name}: {value}`" for name, value in row["options"].items() if name in _TRL_OPTIONS)
        predicted, measured = row["predicted"]["phases"], row["measured"].get("phases", {})
        peaks = [
            f"{predicted[phase]['gpu'] / _GIB:.1f} / {measured[phase]['gpu'] / _GIB:.1f}" if measured else ""
            for phase in PHASES
        ]
        ran = len(row["measured"].get("all_seconds", []))
        model = row["arm"].partition("-")[0].upper()
        yield f"| {model}, {options} | {' | '.join(peaks)} | {row['predicted']['verdict']}; {ran} |"


def _lines(found: Sequence[Row]) -> Iterator[str]:
    yield "| configurations | value | count | median error | 95th percentile | predicted ÷ measured | > 2 % too small |"
    yield "|---|---|---|---|---|---|---|"
    before, today = statistics_of(found), statistics_of([compared_again(row) for row in found])
    sets = {"drawn, predicted before they ran": before["drawn"], "all, predicted as today": today["all"]}
    for title, of_set in sets.items():
        for value, shown in _VALUES.items():
            error = of_set.get(value, {"count": 0})
            if error["count"]:
                yield (
                    f"| {title} ({of_set['configurations']}) | {shown} | {error['count']} | {error['median']:.1%} | "
                    f"{error['percentile_95']:.1%} | {error['least_ratio']:.2f} to {error['greatest_ratio']:.2f} | "
                    f"{error['underestimates']:.1%} |"
                )
    yield ""
    yield f"![Predicted and measured peaks and seconds]({PLOT.name})"
    yield ""
    yield "| job | set | rollout, GiB | update, GiB | sync, GiB | engine, host | policy, host | seconds a step |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in found:
        yield "| " + " | ".join(_cells(row)) + " |"


def _cells(row: Row) -> Iterator[str]:
    yield f"{row['job']}{'' if 'H100' in str(row.get('facts', {}).get('gpu', 'H100')) else ', H200'}"
    yield "drawn" if row["drawn"] else "fitted" if row["in_sample"] else "chosen"
    if "phases" not in row:
        yield from (str(row.get("reason", "")), "", "", "", "", "")
        return
    phases = row["phases"]
    yield from (_pair(phases[phase].get("gpu"), _GIB) for phase in PHASES)
    yield _pair(phases["rollout"].get("host"), _GIB)
    yield _pair(phases["update"].get("host"), _GIB)
    changed = "" if has_held(row) else f", {row['plan_changes']} plan changes"
    yield _pair(row["step_seconds"], 1) + changed


def _pair(pair: Row | None, unit: int) -> str:
    return f"{pair['predicted'] / unit:.1f} / {pair['measured'] / unit:.1f}" if pair else ""


_INK, _MUTED, _GRID = "#1f2933", "#66727f", "#e4e7eb"
_PHASE_COLORS = {"rollout": "#0072b2", "update": "#d55e00", "sync": "#009e73"}
"""Distinguishable with color blindness. Source: Okabe and Ito, Color Universal Design (2008)."""
_STYLE: dict[str, Any] = {
    "figure.figsize": (9.0, 4.8),
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 11,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    # Far enough that the first label does not touch the lowest one of the other axis.
    "xtick.major.pad": 8,
    "lines.solid_capstyle": "round",
    # Text stays text in the SVG: searchable, and in the reader's own font.
    "svg.fonttype": "none",
    "svg.hashsalt": "rljob",
}


def plot(found: Sequence[Row]) -> str:
    """SVG: ratios of predicted to measured memory, and seconds of a step; filled if the configuration was drawn."""
    from matplotlib import style

    held = [row for row in found if has_held(row)]
    with style.context(_STYLE):
        figure, (memory, seconds) = _titled_figure(
            "Predicted against measured",
            "Each dot is a peak of a phase, or the seconds of a step. Filled: the configuration was drawn by a seed.",
        )
        for phase in PHASES:
            for value, marker in (("gpu", "o"), ("host", "s")):
                points = [(row["phases"][phase].get(value), row["drawn"]) for row in held]
                _scatter(memory, points, _GIB, marker, _PHASE_COLORS[phase], f"{value}, {phase}")
        _scatter(seconds, [(row["step_seconds"], row["drawn"]) for row in held], 1, "o", _MUTED, "")
        _frame(memory, "GiB", 0.1)
        _frame(seconds, "seconds a step", 0.2)
        memory.legend(frameon=False, fontsize=8, ncols=3, columnspacing=1, loc="lower right")
        output = io.StringIO()
        figure.savefig(output, format="svg", metadata={"Date": None})
    return output.getvalue()


def _titled_figure(title: str, subtitle: str) -> tuple[Any, list[Any]]:
    """A figure of two panels that share the y axis, with a title and a subtitle."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    height = figure.get_figheight()
    figure.set_figheight(height)
    figure.get_layout_engine().set(rect=(0.01, 0.01, 0.98, 1 - 0.86 / height), w_pad=0.1)  # type: ignore[union-attr, call-arg]
    figure.text(0.022, 1 - 0.216 / height, title, fontsize=15, fontweight="bold", va="top")
    figure.text(0.022, 1 - 0.552 / height, subtitle, fontsize=10.5, color=_MUTED, va="top")
    return figure, list(figure.subplots(1, 2, sharey=True, squeeze=False).flat)


def _scatter(
    axes: Any, points: Sequence[tuple[Row | None, bool]], unit: int, marker: str, colour: str, name: str
) -> None:
    for is_drawn in (True, False):
        pairs = [pair for pair, drawn in points if pair and drawn == is_drawn]
        axes.scatter(
            [pair["measured"] / unit for pair in pairs],
            [min(pair["ratio"], _MOST_RATIO) for pair in pairs],
            s=22,
            marker=marker,
            edgecolors=colour,
            facecolors=colour if is_drawn else "none",
            linewidths=1,
            label=name if name and is_drawn else None,
        )
        for pair in pairs:
            if pair["ratio"] > _MOST_RATIO:
                place = pair["measured"] / unit, _MOST_RATIO
                axes.annotate(f"{pair['ratio']:.0f} ×", place, (7, -3), textcoords="offset points", fontsize=8)


def _frame(axes: Any, unit: str, tolerance: float) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    for ratio in (1 - tolerance, 1, 1 + tolerance):
        axes.axhline(ratio, color=_MUTED, linewidth=1 if ratio == 1 else 0.6, zorder=0)
    axes.set_ylim(0.6, _MOST_RATIO + 0.05)
    axes.set_xlabel(f"measured, {unit}")
    axes.set_ylabel("predicted ÷ measured" if unit == "GiB" else "")


def write() -> list[Path]:
    """Write the pages and the plot; returns their paths."""
    for path, text in (written := pages() | {PLOT: plot(rows())}).items():
        path.write_text(text, encoding="utf-8")
    return list(written)
