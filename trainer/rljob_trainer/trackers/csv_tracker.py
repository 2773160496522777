"""CSV files, for spreadsheets and data frames. Samples and the summary are in other files of the output directory."""

from __future__ import annotations

import csv
import time as clock
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rljob_client.run_directory.samples import Sample
from rljob_trainer.trackers.tracker import Status, TrackedRun, Tracker


class CsvTracker(Tracker):
    """`metrics.csv` and `notes.csv` in `csv/` of the output directory, or in `args.logdir`."""

    def __init__(self, run: TrackedRun) -> None:
        self.run_id = str(run.spec.args.get("logdir", "csv"))
        directory = run.directory / self.run_id
        directory.mkdir(parents=True, exist_ok=True)
        self._metrics = _Table(directory / "metrics.csv", ["step", "time", "name", "value"])
        self._notes = _Table(directory / "notes.csv", ["step", "time", "title", "text"])

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        self._metrics.append([step, time, name, value] for name, value in values.items())

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        """`samples.jsonl` has them."""

    def note(self, title: str, text: str, step: int) -> None:
        self._notes.append([[step, clock.time(), title, " ".join(text.split())]])

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """`summary.json` has it."""


class _Table:
    """A file with one row in each line."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        with suppress(FileNotFoundError), path.open("rb+") as file:  # a killed process may have left half a line
            file.truncate(file.read().rfind(b"\n") + 1)
        if not path.exists() or not path.stat().st_size:
            self.append([columns])

    def append(self, rows: Iterable[Sequence[Any]]) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
