"""Runs a program that runs out of memory on purpose, and diagnoses its evidence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljob_testing.induced_failures.card import LOCK_VARIABLE, SECONDS_VARIABLE
from rljob_testing.induced_failures.catalogue import SKIPPED_EXIT_CODE, FailingProgram
from rljob_testing.induced_failures.recorded_evidence import pack
from rljob_testing.machine import run_for

DIAGNOSE_SECONDS = 60
LONGEST_SECONDS = 300
"""Maximum duration of a program, with its wait for the GPU."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one program."""

    induced: str
    program: str
    ended: str
    """failed, not diagnosed, skipped, timed out, no failure, or not run."""
    seconds: float
    diagnoses: list[dict[str, Any]] = field(default_factory=list)
    """Diagnoses of `rljob diagnose --json`, the most likely first."""
    note: str = ""


def induce(program: FailingProgram, output: Path) -> Row:
    """Run `program` and diagnose its evidence. Problems go into the row."""
    folder = output / "failures" / str(program.failure_class) / program.name
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    exit_code = run(program, folder, output / "gpu.lock")
    seconds = round(time.monotonic() - begun, 1)
    log = (folder / "logs" / "program.log").read_text(errors="replace").strip().splitlines()
    last_line = log[-1][:200] if log else ""
    row = Row(str(program.failure_class), program.name, "failed", seconds, note=last_line)
    if exit_code == SKIPPED_EXIT_CODE:
        return Row(row.induced, row.program, "skipped", seconds, note=last_line)
    if exit_code is None or any(text.startswith("Timeout (") for text in log):
        return Row(row.induced, row.program, "timed out", seconds, note=last_line)
    try:
        diagnoses = diagnose(folder)
        pack(folder, output / "recorded", f"{program.title} of rljob_testing.induced_failures")
    except (subprocess.SubprocessError, ValueError, OSError) as problem:
        return Row(row.induced, row.program, "failed", seconds, note=f"not diagnosed: {problem}"[:300])
    if not diagnoses:
        return Row(row.induced, row.program, "not diagnosed" if exit_code else "no failure", seconds, note=last_line)
    return Row(row.induced, row.program, "failed", seconds, diagnoses)


def run(program: FailingProgram, folder: Path, lock: Path) -> int | None:
    """Exit code of the program; None if it was killed because it took too long."""
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    environment |= {LOCK_VARIABLE: str(lock), SECONDS_VARIABLE: str(program.seconds), **program.variables}
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's
    command = [sys.executable, "-m", "rljob_testing.induced_failures", program.title, str(folder)]
    return run_for(command, folder / "logs" / "program.log", LONGEST_SECONDS, environment)


def diagnose(folder: Path) -> list[dict[str, Any]]:
    """Output of `rljob diagnose --json` for the folder, without advice."""
    command = [sys.executable, "-m", "rljob_client", "diagnose", "--json", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DIAGNOSE_SECONDS)
    return [{name: value for name, value in found.items() if name != "advice"} for found in json.loads(done.stdout)]
