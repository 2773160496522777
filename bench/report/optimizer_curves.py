"""Table and figure of one job with each form of the optimizer's state."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report.markdown import Result, Row, source, table

REFERENCE = "float32"
"""The arm that the others are compared with."""
CURVES = {"reward": "Mean reward", "loss": "Loss", "grad_norm": "Norm of the gradient"}
WINDOW_STEPS = 5
_LINES: dict[str, tuple[str, Any]] = {
    "float32": ("#1f2933", "-"),
    "float32, streamed": ("#56b4e9", (0, (1, 2))),
    "bfloat16 moments": ("#d55e00", "-"),
    "int8 moments": ("#cc79a7", "-"),
    "bfloat16 weights": ("#009e73", "-"),
    "bfloat16 weights and moments": ("#0072b2", "-"),
}
"""Colour and dashes. An arm that equals another is dotted, so that both are visible."""
_OTHER = ("#e0a100", "-")


def block(result: Result) -> str:
    """Rewards and their differences from float32 by arm, and the noise of the seeds."""
    *arms, verdict = result["rows"]
    head = ("optimizer's state", "reward, last quarter", "difference", "reward, all steps", "difference", "curves")
    noise = [f"{verdict[key]['noise']:.4f}" for key in ("last_quarter", "all_steps")]
    rows = [_row(arm, verdict, _shared_seeds(arms)) for arm in arms]
    return f"{source(result)}\n{table(head, [*rows, ('noise: seeds of float32', '', noise[0], '', noise[1], '')])}"


def _shared_seeds(arms: Sequence[Row]) -> int:
    """Seeds of every arm, which come first: float32 has more."""
    return min(len(arm["runs"]) for arm in arms)


def _row(arm: Row, verdict: Row, seeds: int) -> tuple[str, ...]:
    cells = [arm["arm"]]
    for key in ("last_quarter", "all_steps"):
        difference = verdict[key]["differences"].get(arm["arm"])
        cells += [f"{statistics.fmean(arm[key][:seeds]):.3f}", "–" if difference is None else f"{difference:+.4f}"]
    return (*cells, f"equal to {arm['identical_to']}" if arm["identical_to"] else "")


def draw(result: Result, path: Path) -> None:
    """Write the figure as PNG: running means over the seeds that all arms have; a band over all seeds of float32."""
    import numpy as np
    from matplotlib import style

    from rljob_trainer.plot.reward_plot import running_mean
    from rljob_trainer.plot.style import INK, MUTED, STYLE, stacked_figure, step_axis

    *arms, verdict = result["rows"]
    of_quarter = verdict["last_quarter"]
    with style.context([STYLE, {"figure.figsize": (9.0, 4.6)}]):
        figure, panels = stacked_figure(
            f"Mean rewards differ from float32's by at most {abs(of_quarter['largest_difference']):.3f}",
            f"Last quarter; between seeds of float32: {of_quarter['noise']:.3f}. {result['note']}.",
            rows=len(CURVES),
        )
        for axes, (curve, title) in zip(panels, CURVES.items(), strict=True):
            axes.set_title(title, loc="left", fontsize=12, color=INK)
            for arm in arms:
                smooth = np.array([running_mean(np.array(run[curve]), WINDOW_STEPS) for run in arm["runs"]])
                steps = np.arange(1, smooth.shape[1] + 1)
                colour, dashes = _LINES.get(arm["arm"], _OTHER)
                if arm["arm"] == REFERENCE:
                    axes.fill_between(steps, smooth.min(0), smooth.max(0), color=MUTED, alpha=0.2, linewidth=0)
                axes.plot(
                    steps,
                    smooth[: _shared_seeds(arms)].mean(0),
                    color=colour,
                    linestyle=dashes,
                    linewidth=1.8,
                    label=arm["arm"],
                )
            step_axis(axes, 1, len(steps))
        panels[0].legend(
            loc="lower right",
            frameon=False,
            fontsize=10,
            title=f"means of the last {WINDOW_STEPS} steps; band: seeds of float32",
            title_fontsize=10,
            ncols=2,
        )
        figure.savefig(path)
