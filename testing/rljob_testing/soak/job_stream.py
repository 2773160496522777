"""Jobs one after another, each watched to its end, read, and deleted."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_testing.cluster.job_status import attempt, finished, holds, status
from rljob_testing.soak.cluster import Object, SoakCluster
from rljob_testing.soak.jobs import job_of
from rljob_trainer.errors import OutputUnavailable
from rljob_trainer.ledger.ledger import read_ledger
from rljob_trainer.ledger.records import LedgerRecord

_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """A job as it was last seen, and its ledger. `damage`: what is wrong with that. `seconds`: until the job's end."""

    job: Object
    ledger: tuple[LedgerRecord, ...]
    damage: str
    seconds: float

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Lane:
    """`last_start` and `deadline`, by `time.monotonic()`: no job begins after the one, and none is waited for after the
    other. `kept`: the folder that gets each job's last status and ledger."""

    number: int
    seed: int
    cluster: SoakCluster
    last_start: float
    deadline: float
    kept: Path
    tell: Callable[[str], None]

    def run(self) -> list[JobOutcome]:
        """Raises ApiServerAway."""
        outcomes: list[JobOutcome] = []
        while time.monotonic() < self.last_start:
            outcomes.append(self._run(job_of(self.seed, self.number, len(outcomes))))
        return outcomes

    def _run(self, manifest: Object) -> JobOutcome:
        name = manifest["metadata"]["name"]
        began = time.monotonic()
        self.cluster.apply(manifest)
        job = self._follow(name)
        seconds = time.monotonic() - began
        self._keep(job)
        ledger, damage = self._read_ledger(name)
        self.cluster.delete("rljob", name)
        return JobOutcome(job, ledger, damage, seconds)

    def _follow(self, name: str) -> Object:
        told = ""
        while True:
            job = self.cluster.job(name)
            if (line := _in_a_line(job)) != told:
                self.tell(line)
                told = line
            if finished(job) or time.monotonic() > self.deadline:
                return job
            time.sleep(_LOOK_SECONDS)

    def _keep(self, job: Object) -> None:
        """The status and the ledger; all that the run left, where the job is not complete."""
        name = job["metadata"]["name"]
        (self.kept / f"{name}.json").write_text(json.dumps(job, indent=2))
        folder = self.cluster.run_folder(name)
        if folder is not None and (folder / "ledger.jsonl").is_file():
            shutil.copyfile(folder / "ledger.jsonl", self._ledger(name))
        if folder is not None and not holds("Complete")(job):
            shutil.copytree(folder, self.kept / name, dirs_exist_ok=True)

    def _read_ledger(self, name: str) -> tuple[tuple[LedgerRecord, ...], str]:
        try:
            return tuple(read_ledger(self._ledger(name)).records), ""
        except OutputUnavailable as error:
            return (), str(error)

    def _ledger(self, name: str) -> Path:
        return self.kept / f"{name}.ledger.jsonl"


def _in_a_line(job: Object) -> str:
    """Phase, attempt, plan, and how the last attempts ended."""
    seen = status(job)
    phase = seen.get("display", {}).get("phase", "Pending")
    ends = [ended["reason"] for ended in seen.get("attempts", []) if ended.get("reason")]
    generation = (seen.get("plan") or {}).get("generation", 1)
    after = f", after {', '.join(ends[-3:])}" if ends else ""
    return f"{job['metadata']['name']}: {phase}, attempt {attempt(job).get('number', 0)}, plan {generation}{after}"
