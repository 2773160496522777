"""Runs the trainer's inspection of a job in a process of its own, with a time limit: it imports the user's code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rljob_api.job import RLJob, RLJobSpec
from rljob_client.validation.suspicious_values import Finding, memory_findings
from rljob_memory.planning.model_size import compute_bytes, shape_in_uri

TIMEOUT_SECONDS = 120.0
"""A task with many prompts takes 20 s, a download of a tokenizer seconds."""


def inspect_job(job: RLJob, directory: Path, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Finding]:
    """The findings about model, data set, reward function and engine arguments.

    `directory`: of the task's files and Python modules.
    """
    spec = job.spec
    if spec.trainer is not None:
        return [Finding("note", ("spec", "trainer"), "another trainer reads model, task and engineArgs: not checked")]
    if find_spec("rljob_trainer") is None:
        return list(_without_trainer(spec))
    text = job.model_dump_json(by_alias=True, exclude_none=True)
    with tempfile.TemporaryDirectory() as folder:
        results, errors = Path(folder) / "results.jsonl", Path(folder) / "errors.txt"
        command = [sys.executable, "-P", "-m", "rljob_trainer.inspection", str(directory.absolute()), str(results)]
        with errors.open("wb") as stream:
            try:
                finished = subprocess.run(
                    command, input=text.encode(), stdout=stream, stderr=stream, timeout=timeout_seconds, check=False
                )
            except subprocess.TimeoutExpired:
                return findings_in(results, f"takes longer than {timeout_seconds:g} s: not checked")
        if finished.returncode == 0:
            return findings_in(results)
        printed = errors.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(printed) if line.strip()), "it printed nothing")
        return findings_in(results, f"ended the process of the check with {_end(finished.returncode)}: {last:.300}")


def _without_trainer(spec: RLJobSpec) -> Iterator[Finding]:
    """A note, and the prediction for the size of the model in its URI."""
    yield Finding("note", ("spec",), "rljob-trainer is not installed here: model, task and engineArgs are not checked")
    device: Literal["cpu", "cuda"] = "cuda" if spec.policy.gpus_per_replica else "cpu"
    shape = shape_in_uri(spec, compute_bytes(spec, device))
    if shape is not None:
        yield from memory_findings(spec, shape, device)


def _end(returncode: int) -> str:
    return f"exit code {returncode}" if returncode >= 0 else f"the signal {signal.Signals(-returncode).name}"


def findings_in(results: Path, interrupted: str | None = None) -> list[Finding]:
    """The findings in the file of an inspection. `interrupted`: message about the check that began last."""
    entries: Sequence[dict[str, Any]] = []
    if results.exists():
        entries = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    found = [
        Finding(entry["severity"], tuple(entry["field"]), entry["message"]) for entry in entries if "severity" in entry
    ]
    if interrupted is not None:
        last = next((entry for entry in reversed(entries) if "check" in entry), {"check": "the job", "field": ["spec"]})
        found.append(Finding("error", tuple(last["field"]), f"{last['check']} {interrupted}"))
    return found
