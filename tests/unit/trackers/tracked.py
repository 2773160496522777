"""A run of an invented job that reports to one tracker, for tests against the real libraries."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob
from rljob_client.run_directory.records import EvaluationRecord, LedgerRecord
from rljob_client.run_directory.samples import Sample
from rljob_client.run_directory.summary import summarize
from rljob_trainer.trackers.tracker_listener import TrackerListener
from tests.unit.ledger.samples import plan_change, step_record

CLOSE_SECONDS = 240.0


def job(**tracker: Any) -> RLJob:
    spec = {
        "model": {"uri": "hf://org/name"},
        "task": {"name": "digits"},
        "algorithm": {"steps": 4},
        "env": [{"name": "WANDB_API_KEY", "value": "in-plain-text"}],
        "tracking": [tracker],
    }
    return RLJob.model_validate({"metadata": {"name": "sums"}, "spec": spec}, by_alias=True, by_name=False)


def sample(step: int, kind: str = "train", **changes: Any) -> Sample:
    values = {
        "step": step,
        "kind": kind,
        "prompt_index": 3,
        "prompt": "4 + 3 =",
        "response": "It is | 7.\nYes.",
        "reward": 1.0,
        "advantage": 0.5 if kind == "train" else None,
        "finished": True,
        "tokens": 5,
        "scored_at": 1000.0 + step,
    }
    return Sample.model_validate(values | changes)


def evaluation(step: int, reward: float = 0.75) -> EvaluationRecord:
    return EvaluationRecord(
        attempt=1,
        step=step,
        prompts=10,
        samples_per_prompt=8,
        metrics={"reward_mean": reward, "avg@8": reward},
        seconds=2.0,
        evaluated_at=1000.5 + step,
    )


class TrackedAttempt:
    """An attempt whose tracker gets the calls of a loop."""

    def __init__(self, directory: Path, records: Sequence[LedgerRecord], **tracker: Any) -> None:
        self.records = list(records)
        self.warnings: list[str] = []
        job_of_run = job(**tracker)
        [spec] = job_of_run.spec.tracking or []
        self.listener = TrackerListener(spec, job_of_run, directory, self.records, self.warnings.append)

    def commit(self, step: int, reward: float = 0.5, **changes: Any) -> None:
        record = step_record(step, reward, **changes)
        self.records.append(record)
        self.listener.step_committed(record, {})

    def evaluate(self, step: int) -> None:
        record = evaluation(step)
        self.records.append(record)
        self.listener.evaluated(record)

    def recover(self, step: int) -> None:
        self.listener.recovered(plan_change(2, step=step, seconds=3.0))


@contextmanager
def attempt(
    directory: Path, records: Sequence[LedgerRecord] = (), *, finish: bool = True, **tracker: Any
) -> Iterator[TrackedAttempt]:
    """An attempt that ends with the block; without `finish` as if its process had been killed."""
    tracked = TrackedAttempt(directory, records, **tracker)
    yield tracked
    if finish:
        summary = summarize(tracked.records, job="sums", total_steps=4, exit_code=ExitCode.COMPLETE)
        tracked.listener.finished(summary)
    tracked.listener.close(time.monotonic() + CLOSE_SECONDS)
    assert tracked.warnings == []
