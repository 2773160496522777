"""Runs every program of tests/gpu/programs on this machine's GPU, diagnoses what each left behind, counts the mistakes.

    python -m bench.induced_failures --output DIR [--only TITLE …]

Each program runs in its own process and folder, several at a time: they load their libraries together and take turns
on the GPU. A program that hangs, or does not fail, is a row like any other. After each one the record
(`DIR/induced_failures.json`) and the packed evidence (`DIR/recorded/CLASS/…`, in `DIR/recorded.tar.gz`) are whole as
far as they go. 5 minutes on one H200 with 16 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.bounded_process import run_for
from bench.confusion_matrix import score, table
from bench.record import record
from bench.recorded_evidence import pack
from tests.gpu.programs.card import LOCK_VARIABLE, SECONDS_VARIABLE
from tests.gpu.programs.catalogue import SKIPPED_EXIT_CODE, Program, programs

AT_A_TIME = 6
DIAGNOSE_SECONDS = 60
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class Row:
    """One program's end. `ended`: failed, not diagnosed, skipped, timed out, no failure, or not run. `diagnoses`: as
    `rljob diagnose --json` prints them, the best first."""

    induced: str
    program: str
    ended: str
    seconds: float
    diagnoses: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""


def main(output: Path, only: Sequence[str], seconds: float) -> None:
    chosen = [program for program in programs() if not only or program.title in only]
    output.mkdir(parents=True, exist_ok=True)
    deadline, rows = time.monotonic() + seconds, list[Row]()
    # Should time run out, few are lost.
    chosen.sort(key=lambda program: program.seconds)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        futures = {pool.submit(induce, program, output, deadline): program for program in chosen}
        for number, future in enumerate(as_completed(futures), start=1):
            try:
                rows.append(future.result())
            except Exception as problem:  # One program's trouble is no reason to lose the others.
                program = futures[future]
                rows.append(Row(str(program.failure_class), program.name, "not run", 0.0, note=repr(problem)[:300]))
            save(rows, output)
            print(f"{number:>3}/{len(chosen)}  {line(rows[-1])}", flush=True)
    print(table([asdict(row) for row in rows]))


def induce(program: Program, output: Path, deadline: float) -> Row:
    """Run `program` and have its evidence diagnosed. Whatever goes wrong is said in the row."""
    folder = output / "failures" / str(program.failure_class) / program.name
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    exit_code = run(program, folder, max(deadline - begun, 1.0), output / "gpu.lock")
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
        pack(folder, output / "recorded", f"{program.title} of tests/gpu/programs")
    except (subprocess.SubprocessError, ValueError, OSError) as problem:
        return Row(row.induced, row.program, "failed", seconds, note=f"not diagnosed: {problem}"[:300])
    if not diagnoses:
        return Row(row.induced, row.program, "not diagnosed" if exit_code else "no failure", seconds, note=last_line)
    return Row(row.induced, row.program, "failed", seconds, diagnoses)


def run(program: Program, folder: Path, seconds: float, lock: Path) -> int | None:
    """The exit code of the program, or None where it had to be ended after `seconds`."""
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    environment |= {LOCK_VARIABLE: str(lock), SECONDS_VARIABLE: str(program.seconds), **program.variables}
    command = [sys.executable, "-m", "tests.gpu.programs", program.title, str(folder)]
    return run_for(command, folder / "logs" / "program.log", seconds, environment)


def diagnose(folder: Path) -> list[dict[str, Any]]:
    """What `rljob diagnose --json` says of the folder, without its advice."""
    command = [sys.executable, "-m", "rljob_trainer", "diagnose", "--json", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DIAGNOSE_SECONDS)
    return [{name: value for name, value in found.items() if name != "advice"} for found in json.loads(done.stdout)]


def save(rows: Sequence[Row], output: Path) -> None:
    """The record and the evidence so far."""
    as_dicts = [asdict(row) for row in rows]
    note = "each program of tests/gpu/programs, diagnosed by `rljob diagnose` from what it left behind"
    record("induced_failures", [{"program": "all", **score(as_dicts)}, *as_dicts], note, output)
    with tarfile.open(output / "recorded.tar.gz", "w:gz") as archive:
        if (output / "recorded").exists():
            archive.add(output / "recorded", "recorded")


def line(row: Row) -> str:
    said = ", ".join(f"{found['class']} {found['confidence']}" for found in row.diagnoses) or f"{row.ended}: {row.note}"
    return f"{row.seconds:5.1f} s  {row.induced}.{row.program}  →  {said}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="where evidence and record go")
    titles = [program.title for program in programs()]
    parser.add_argument("--only", nargs="*", default=[], metavar="TITLE", choices=titles, help="as Class.name")
    parser.add_argument("--seconds", type=float, default=420, help="end what still runs after so long")
    main(**vars(parser.parse_args()))
