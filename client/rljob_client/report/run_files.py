"""Reads what a report shows from the output directory of a run, which may be in progress, or may have failed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJobSpec
from rljob_api.manifest import ManifestError, only_job, read_text
from rljob_api.memory_failure import MemoryFailure
from rljob_client.errors import OutputUnavailable
from rljob_client.report.memory_timeline import Timeline, memory_timeline
from rljob_client.run_directory.ledger import read_ledger
from rljob_client.run_directory.memory_logs import logged_samples
from rljob_client.run_directory.records import (
    AttemptRecord,
    LedgerRecord,
    StepRecord,
    attempt_records,
    plan_change_records,
    step_records,
)
from rljob_client.run_directory.samples import Sample, read_samples
from rljob_client.run_directory.summary import Summary, summarize
from rljob_memory.budget import Setup, setup_of_facts
from rljob_memory.sample import MemorySample

_ANSWERED_WITHIN_SECONDS = 120.0
"""A plan change this soon after a failure is its recovery, and names its class."""
_LARGE_LOGS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RunContents:
    """The contents of a run's output directory."""

    directory: Path
    records: list[LedgerRecord]
    steps: list[StepRecord]
    attempts: list[AttemptRecord]
    summary: Summary
    """Summary of the records. Status and exit reason are those of `summary.json` if `is_ended`."""

    is_ended: bool
    """True if `summary.json` describes the last record; False for a run in progress, and for one that was killed."""

    manifest: str
    """Text of `job.yaml`; empty without one."""

    spec: RLJobSpec | None
    """Spec of `job.yaml`; None if this version cannot read it."""

    samples: list[Sample]
    timeline: Timeline | None
    """Memory over time; None without memory logs."""

    unanswered: list[tuple[datetime, MemoryFailure]]
    """Out-of-memory failures that no change of the memory plan followed, with their times."""

    @property
    def setup(self) -> Setup | None:
        """Machine, model and work of the last attempt; None if they were not recorded."""
        return setup_of_facts(self.attempts[-1].plan_facts) if self.attempts else None

    @property
    def run_seconds(self) -> float:
        """Seconds between the start of each attempt and its last record or memory sample, over all attempts."""
        times = [step.committed_at for step in self.steps]
        times += [moment.time for moment in self.timeline.moments] if self.timeline else []
        starts = [*(attempt.started_at for attempt in self.attempts), math.inf]
        return sum(
            max((time for time in times if begin < time < end), default=begin) - begin
            for begin, end in pairwise(starts)
        )

    @property
    def gpus(self) -> int:
        """GPUs that the last attempt has used; 0 on CPUs."""
        setup = self.setup
        if setup is None or setup.hardware.device == "cpu":
            return 0
        return setup.work.policy_ranks + (0 if setup.work.is_colocated else setup.work.engine_processes)


def read_run(directory: Path) -> RunContents:
    """Read the files of a run, and change none. Raises `OutputUnavailable` if `directory` is not that of a run."""
    ledger = directory / "ledger.jsonl"
    if not ledger.is_file():
        raise OutputUnavailable(
            f"expected the output directory of a run, found no ledger.jsonl in {directory}; "
            "give the directory that rljob run wrote to, or that rljob fetch --path . has fetched"
        )
    records = read_ledger(ledger).records
    steps, attempts = step_records(records), attempt_records(records)
    manifest, name, spec = _manifest(directory / "job.yaml")
    stored = _stored_summary(directory / "summary.json")
    is_ended = stored is not None and (stored.steps, stored.attempts) == (len(steps), len(attempts))
    summary = summarize(
        records,
        job=stored.job if stored else name or directory.absolute().name,
        total_steps=spec.algorithm.steps if spec else stored.total_steps if stored else len(steps),
        exit_code=_exit_code(stored.exit_code) if stored and is_ended else ExitCode.COMPLETE,
        exit_reason=stored.exit_reason if stored and is_ended else None,
    )
    answers = [each.change.time for each in plan_change_records(records) if not each.change.preventive]
    return RunContents(
        directory=directory,
        records=records,
        steps=steps,
        attempts=attempts,
        summary=summary,
        is_ended=is_ended,
        manifest=manifest,
        spec=spec,
        samples=list(read_samples(directory / "samples.jsonl")),
        timeline=memory_timeline(_memory_samples(directory / "memory"), [each.started_at for each in attempts]),
        unanswered=_unanswered(directory / "oom", answers),
    )


def _memory_samples(logs: Path) -> Iterator[tuple[str, MemorySample]]:
    """The samples of the logs; of large ones only those at the ends of phases, which have the peaks of the phases."""
    is_large = sum(log.stat().st_size for log in logs.glob("*.jsonl*")) > _LARGE_LOGS_BYTES
    return ((actor, sample) for actor, sample in logged_samples(logs) if not is_large or sample.micro_batch is None)


def _manifest(path: Path) -> tuple[str, str, RLJobSpec | None]:
    """Text, name of the job and spec; empty and None as far as they cannot be read."""
    text = ""
    with suppress(ManifestError):
        text = read_text(path)
        job = only_job(path).load()
        return text, job.metadata.name or "", job.spec
    return text, "", None


def _stored_summary(path: Path) -> Summary | None:
    with suppress(OSError, ValidationError):
        return Summary.model_validate_json(path.read_bytes())
    return None


def _exit_code(value: int) -> ExitCode:
    return ExitCode(value) if value in set(ExitCode) else ExitCode.ERROR


def _unanswered(accounts: Path, answers: Sequence[datetime]) -> list[tuple[datetime, MemoryFailure]]:
    """The failures in the directory `accounts`, which may be missing, that none of the `answers` follows."""
    found = []
    for path in sorted(accounts.glob("*.json")):
        with suppress(OSError, ValidationError):
            account = MemoryFailure.model_validate_json(path.read_bytes())
            time = account.time
            if time is not None and not any(
                0 <= (answer - time).total_seconds() <= _ANSWERED_WITHIN_SECONDS for answer in answers
            ):
                found.append((time.astimezone(UTC), account))
    return sorted(found, key=lambda each: each[0])
