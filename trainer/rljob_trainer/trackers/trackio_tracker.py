"""Trackio."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rljob_client.run_directory.samples import Sample
from rljob_trainer.trackers.tracker import SAMPLE_COLUMNS, Status, TrackedRun, Tracker, rows


class TrackioTracker(Tracker):
    """A run in Trackio: in `trackio/` of the output directory, unless TRACKIO_DIR, a Space or a server is given."""

    def __init__(self, run: TrackedRun) -> None:
        # The package reads the variable once, when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str(run.directory.absolute() / "trackio"))
        import trackio

        # Trackio resumes by name, so runs of other output directories must have others.
        self.run_id = run.run_id or f"{run.name}-{secrets.token_hex(3)}"
        args = {
            "project": run.project,
            "name": self.run_id,
            "resume": "allow",
            "config": dict(run.config),
            "embed": False,
            "auto_log_gpu": False,  # the controller has no GPU
            "auto_log_cpu": False,
            **run.spec.args,
        }
        self._trackio = trackio
        self._run = trackio.init(**args)

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        table = self._trackio.Table(columns=list(SAMPLE_COLUMNS), data=rows(samples))
        self._run.log({f"samples/{samples[0].kind}": table}, step=step)

    def note(self, title: str, text: str, step: int) -> None:
        self._run.alert(title, text)

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        self._run.log({f"summary/{name}": value for name, value in numbers.items()})
        self._run.alert(status, str(summary["exit_reason"]), level=self._trackio.AlertLevel.INFO)
        self._run.finish()
