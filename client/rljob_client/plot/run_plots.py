"""Draws all plots of a run from its files. A run in progress, or one that failed, is drawn as far as it got."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure
from pydantic import ValidationError

from rljob_api.memory_failure import MemoryFailure
from rljob_api.plan_change import PlanChange
from rljob_client.errors import OutputUnavailable
from rljob_client.plot.learning_plot import draw_learning
from rljob_client.plot.memory_plot import draw_memory, memory_peaks
from rljob_client.plot.memory_timeline import memory_timeline
from rljob_client.plot.reward_plot import draw_reward
from rljob_client.plot.style import STYLE
from rljob_client.plot.timeline_plot import Mark, draw_timeline
from rljob_client.plot.timing_plot import draw_timing
from rljob_client.run_directory.durable_files import writing
from rljob_client.run_directory.ledger import read_ledger
from rljob_client.run_directory.memory_logs import logged_samples
from rljob_client.run_directory.records import (
    LedgerRecord,
    StepRecord,
    attempt_records,
    plan_change_records,
    step_records,
)
from rljob_memory.recovery import messages
from rljob_memory.sizes import human_bytes

_FORMATS = ("png", "svg")
_ANSWERED_WITHIN_SECONDS = 120.0
"""A plan change this soon after a failure is its recovery, and names its class."""


def plot_run(directory: Path, output: Path | None = None) -> list[Path]:
    """Draw `reward`, `learning`, `timing`, `memory` and `memory_timeline`, as `.png` and `.svg`. Returns their paths.

    `output`: directory for the plots; default: `directory/plots`. Plots without data are left out: a run that failed in
    its first step has only the memory timeline.
    Raises `OutputUnavailable` if there is no run or nothing to draw, or if the plots cannot be written.
    """
    directory = Path(directory)
    records = _ledger_records(directory)
    output = output or directory / "plots"
    with style.context(STYLE):
        figures = {**_step_figures(directory, step_records(records)), **_timeline_figure(directory, records)}
        if not figures:
            raise OutputUnavailable(f"nothing to draw yet: {directory} has no committed step.")
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
        return [path for name, figure in figures.items() for path in _save(figure, output / name)]


def _ledger_records(directory: Path) -> list[LedgerRecord]:
    ledger = directory / "ledger.jsonl"
    if not ledger.exists():
        raise OutputUnavailable(
            f"nothing to draw: {directory} is not the output of a run (it has no ledger.jsonl). "
            "Give the directory that `rljob run` wrote to."
        )
    return read_ledger(ledger).records


def _step_figures(directory: Path, steps: list[StepRecord]) -> dict[str, Figure]:
    if not steps:
        return {}
    peaks = memory_peaks(directory / "memory", steps)
    figures = {
        "reward": draw_reward(steps),
        "learning": draw_learning(steps),
        "timing": draw_timing(steps),
        "memory": draw_memory(peaks) if peaks.by_role else None,
    }
    return {name: figure for name, figure in figures.items() if figure}


def _timeline_figure(directory: Path, records: list[LedgerRecord]) -> dict[str, Figure]:
    attempts = [attempt.started_at for attempt in attempt_records(records)]
    timeline = memory_timeline(logged_samples(directory / "memory"), attempts)
    if timeline is None:
        return {}
    changes = [record.change for record in plan_change_records(records)]
    return {"memory_timeline": draw_timeline(timeline, timeline_marks(changes, directory / "oom"), attempts)}


def timeline_marks(changes: Sequence[PlanChange], accounts: Path) -> list[Mark]:
    """The marks in the order of time. `accounts`: directory of `MemoryFailure`s; may be missing."""
    answers = [change.time.timestamp() for change in changes if not change.preventive]
    unanswered = [
        Mark(time, f"out of memory: {human_bytes(account.requested_bytes or 0)} requested", failure=True)
        for time, account in _read_accounts(accounts)
        if not any(0 <= answer - time <= _ANSWERED_WITHIN_SECONDS for answer in answers)
    ]
    return sorted([*unanswered, *map(_mark, changes)], key=lambda mark: mark.time)


def _mark(change: PlanChange) -> Mark:
    text = f"{change.diagnosis.class_name}: {messages.setting_message(change.remedy)}"
    return Mark(change.time.timestamp(), text, failure=not change.preventive)


def _read_accounts(directory: Path) -> Iterator[tuple[float, MemoryFailure]]:
    """The failures in the directory, each with its time in seconds since the epoch."""
    for path in sorted(directory.glob("*.json")):
        with suppress(OSError, ValidationError):
            account = MemoryFailure.model_validate_json(path.read_bytes())
            if account.time is not None:
                yield account.time.timestamp(), account


def _save(figure: Figure, stem: Path) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}.{format}") for format in _FORMATS]
    for path in paths:
        with writing(path):
            # Without the date, the same run gives the same file.
            figure.savefig(path, metadata={"Date": None})
    return paths
