"""The interface of an experiment tracker: one subclass, in a file of its own, for each library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rljob_api.tracking import TrackerSpec
from rljob_client.run_directory.samples import Sample

DEFAULT_PROJECT = "rljob"
CLOSE_SECONDS = 30.0
"""Time that the trackers of a run have at its end, all together."""

SAMPLE_COLUMNS = ("step", "kind", "prompt_index", "prompt", "response", "reward", "advantage", "finished", "tokens")

Status = Literal["Complete", "Stopped", "Failed"]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker shows."""

    spec: TrackerSpec
    job: str

    config: Mapping[str, Any]
    """The manifest's settings, without those that may contain secrets."""

    directory: Path
    """Output directory, for trackers that write files."""

    run_id: str | None
    """Id of the run in the tracker, from an earlier attempt; None for a new run."""

    next_step: int
    """First step that is going to be reported. Later ones of an earlier attempt are reported again."""

    @property
    def project(self) -> str:
        return self.spec.project or DEFAULT_PROJECT

    @property
    def name(self) -> str:
        return self.spec.run_name or self.job


class Tracker(ABC):
    """A run in a tracker. All methods are called from one thread, which may wait for a server."""

    run_id: str
    """Id by which `TrackedRun` resumes the run."""

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Start the run, or resume it. Raises the library's errors, as all methods do."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Log the values of a step or of an evaluation after it. `time`: seconds since the epoch."""

    @abstractmethod
    def samples(self, samples: Sequence[Sample], step: int) -> None:
        """Log samples of one kind as a table, where the tracker has tables."""

    @abstractmethod
    def note(self, title: str, text: str, step: int) -> None:
        """Log a failure, or the change that answers it."""

    @abstractmethod
    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Log the summary and end the run."""


def rows(samples: Sequence[Sample]) -> list[list[Any]]:
    """The samples as rows of a table with `SAMPLE_COLUMNS`."""
    return [[getattr(sample, column) for column in SAMPLE_COLUMNS] for sample in samples]
