"""Draws what a run has left on disk so far; a run that is still going on, or was aborted, is drawn as far as it is."""

from __future__ import annotations

from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure

from rljob_trainer.errors import OutputUnavailable
from rljob_trainer.ledger.durable_files import writing
from rljob_trainer.ledger.ledger import read_ledger
from rljob_trainer.ledger.records import StepRecord, step_records
from rljob_trainer.plot.memory_plot import draw_memory
from rljob_trainer.plot.memory_samples import memory_peaks
from rljob_trainer.plot.reward_plot import draw_reward
from rljob_trainer.plot.style import STYLE
from rljob_trainer.plot.timing_plot import draw_timing

_FORMATS = ("png", "svg")


def plot_run(directory: Path, output: Path | None = None) -> list[Path]:
    """Draw the run in `directory` as `reward`, `timing` and `memory`, each `.png` and `.svg`; return their paths.

    `output`: where the pictures go, by default `directory/plots`. Memory is left out where the run has logged none.
    Raises `OutputUnavailable` where there is no run, or no committed step to draw, or the pictures cannot be written.
    """
    directory = Path(directory)
    steps = _committed_steps(directory)
    output = output or directory / "plots"
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    with style.context(STYLE):
        figures = {"reward": draw_reward(steps), "timing": draw_timing(steps)}
        peaks = memory_peaks(directory / "memory", steps)
        if peaks.by_role:
            figures["memory"] = draw_memory(peaks)
        return [path for name, figure in figures.items() for path in _save(figure, output / name)]


def _committed_steps(directory: Path) -> list[StepRecord]:
    ledger = directory / "ledger.jsonl"
    if not ledger.exists():
        raise OutputUnavailable(
            f"nothing to draw: {directory} is not the output of a run (it has no ledger.jsonl). "
            "Give the directory that `rljob run` wrote to."
        )
    steps = step_records(read_ledger(ledger).records)
    if not steps:
        raise OutputUnavailable(f"nothing to draw yet: no step is committed in {directory}.")
    return steps


def _save(figure: Figure, stem: Path) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}.{format}") for format in _FORMATS]
    for path in paths:
        with writing(path):
            # Without the date the same run gives the same file.
            figure.savefig(path, metadata={"Date": None})
    return paths
