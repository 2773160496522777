"""A stream of jobs: each is created, followed to its end, saved and deleted before the next."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.ledger import read_ledger
from rljob_client.run_directory.records import LedgerRecord
from rljob_testing.cluster.job_status import attempt, finished, holds, status
from rljob_testing.soak.cluster import Object, SoakCluster
from rljob_testing.soak.jobs import job_manifest

_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The last status of a job, and its ledger."""

    job: Object
    ledger: tuple[LedgerRecord, ...]
    ledger_error: str
    """The reason why the ledger cannot be read; empty if it can."""
    seconds: float
    """Until the end of the job."""

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class JobStream:
    """Runs jobs one after another."""

    number: int
    seed: int
    cluster: SoakCluster
    last_start: float
    """By `time.monotonic()`: no job starts later."""
    deadline: float
    """By `time.monotonic()`: no job is followed longer."""
    folder: Path
    """Folder for the last status and the ledger of each job."""
    log: Callable[[str], None]

    def run(self) -> list[JobOutcome]:
        """The outcome of each job. Raises ApiServerAway."""
        outcomes: list[JobOutcome] = []
        while time.monotonic() < self.last_start:
            outcomes.append(self._run(job_manifest(self.seed, self.number, len(outcomes))))
        return outcomes

    def _run(self, manifest: Object) -> JobOutcome:
        name = manifest["metadata"]["name"]
        began = time.monotonic()
        self.cluster.apply(manifest)
        job = self._follow(name)
        seconds = time.monotonic() - began
        self._save(job)
        ledger, ledger_error = self._read_ledger(name)
        self.cluster.delete("rljob", name)
        return JobOutcome(job, ledger, ledger_error, seconds)

    def _follow(self, name: str) -> Object:
        logged = ""
        while True:
            job = self.cluster.job(name)
            if (line := _summary_line(job)) != logged:
                self.log(line)
                logged = line
            if finished(job) or time.monotonic() > self.deadline:
                return job
            time.sleep(_LOOK_SECONDS)

    def _save(self, job: Object) -> None:
        """Save status and ledger, and the whole output of a job that is not complete."""
        name = job["metadata"]["name"]
        (self.folder / f"{name}.json").write_text(json.dumps(job, indent=2))
        folder = self.cluster.run_folder(name)
        if folder is not None and (folder / "ledger.jsonl").is_file():
            shutil.copyfile(folder / "ledger.jsonl", self._ledger(name))
        if folder is not None and not holds("Complete")(job):
            shutil.copytree(folder, self.folder / name, dirs_exist_ok=True)

    def _read_ledger(self, name: str) -> tuple[tuple[LedgerRecord, ...], str]:
        try:
            return tuple(read_ledger(self._ledger(name)).records), ""
        except OutputUnavailable as error:
            return (), str(error)

    def _ledger(self, name: str) -> Path:
        return self.folder / f"{name}.ledger.jsonl"


def _summary_line(job: Object) -> str:
    """Phase, attempt, plan, and the reasons of the last attempts."""
    seen = status(job)
    phase = seen.get("display", {}).get("phase", "Pending")
    ends = [ended["reason"] for ended in seen.get("attempts", []) if ended.get("reason")]
    generation = (seen.get("plan") or {}).get("generation", 1)
    after = f", after {', '.join(ends[-3:])}" if ends else ""
    return f"{job['metadata']['name']}: {phase}, attempt {attempt(job).get('number', 0)}, plan {generation}{after}"
