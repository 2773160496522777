"""Runs the real `rljob` command on manifests derived from an example."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rljob_testing.patience import wait_for_end
from rljob_testing.repository import EXAMPLES
from rljob_trainer.roles.warm.setup_worker import DIRECTORY_VARIABLE
from rljob_trainer.roles.warm.start import WarmStart

RLJOB = Path(sys.executable).parent / "rljob"


@dataclass(frozen=True)
class FinishedRun:
    """A finished `rljob run`: its exit code, what it printed, and its output directory."""

    exit_code: int
    printed: str
    output: Path

    @property
    def ledger(self) -> list[dict[str, Any]]:
        lines = (self.output / "ledger.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.ledger if line["kind"] == "step"]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return [line for line in self.ledger if line["kind"] == "attempt"]

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.output / "summary.json").read_text()))


def write_manifest(path: Path, **changes: dict[str, Any]) -> Path:
    """Write the digits example with parts of its spec replaced: `write_manifest(path, algorithm={"steps": 4})`."""
    job = yaml.safe_load((EXAMPLES / "digits.yaml").read_text())
    for section, values in changes.items():
        job["spec"][section] = {**job["spec"].get(section, {}), **values}
    path.write_text(yaml.safe_dump(job))
    return path


COLD = {DIRECTORY_VARIABLE: ""}
"""Variables of a run whose role processes import their libraries themselves."""


@cache
def warm_start() -> WarmStart:
    """Processes with the imports of the roles, for all runs of this pytest process."""
    return WarmStart(("policy", "rollout"), "cpu", steady_environment())


def steady_environment() -> dict[str, str]:
    """That of this process, without the variable that pytest changes with each test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def start_rljob(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Start the command; output and errors are captured together. Its role processes start warm, unless `environment`
    contains `COLD`.
    """
    if arguments[0] == "run" and DIRECTORY_VARIABLE not in environment:
        environment[DIRECTORY_VARIABLE] = str(warm_start().directory)
    return subprocess.Popen(
        [RLJOB, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**steady_environment(), "COLUMNS": "120", **environment},
    )


def rljob_run(manifest: Path, output: Path, *options: str | Path, **environment: str) -> FinishedRun:
    """Run the job to its end, successful or not."""
    process = start_rljob("run", manifest, "--output", output, "--device", "cpu", *options, **environment)
    printed = wait_for_end(process)
    return FinishedRun(process.returncode, printed, output)
