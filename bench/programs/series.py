"""Runs benchmark programs one after another, each for a limited time: for a GPU that is leased by the minute.

    python -m bench.programs.series FILE --output DIR [--seconds N]

FILE has one program in each line: a limit in seconds, a module of `bench.programs`, and its arguments, as in
`180 large_models 8b`. Empty lines, and those that begin with #, are ignored.

A program that reaches its limit is killed with all processes that it started. The others still run. The output of
each is in `DIR/NUMBER-PROGRAM.log`, by the number of its line, and its exit code in `DIR/series.jsonl`: with the same
DIR, a later call runs only the programs that have not succeeded. `--seconds`: a program that could not end within that
time is not started.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Program:
    """One line of a series."""

    number: int
    """Of the line, from 1."""
    limit_seconds: float
    module: str
    arguments: tuple[str, ...]

    @property
    def line(self) -> str:
        return shlex.join([self.module, *self.arguments])


def programs_of(text: str) -> list[Program]:
    """Parse a series. Raises `ValueError` for a line without a limit or a program."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if len(words) < 2:
            raise ValueError(f"line {number}: expected SECONDS PROGRAM [ARGUMENT...], found {line!r}")
        found.append(Program(number, float(words[0]), words[1], tuple(words[2:])))
    return found


def run_series(programs: Sequence[Program], output: Path, seconds: float) -> bool:
    """Run the programs that have not succeeded before, and end all processes that they leave. True if all have."""
    adopt_orphans()
    output.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + seconds
    done = set(_succeeded(output))
    for program in programs:
        if program.line in done:
            continue
        if time.monotonic() + program.limit_seconds > ends:
            print(f"not started, for lack of time: {program.line}", flush=True)
            continue
        print(f"{time.strftime('%H:%M:%S')} {program.line}", flush=True)
        began = time.monotonic()
        code = _run(program, output / f"{program.number:02}-{program.module}.log")
        end = {"program": program.line, "exit_code": code, "seconds": round(time.monotonic() - began, 1)}
        print(f"{time.strftime('%H:%M:%S')} {json.dumps(end)}", flush=True)
        with (output / "series.jsonl").open("a") as stream:
            stream.write(json.dumps(end) + "\n")
    return {program.line for program in programs} <= set(_succeeded(output))


def _run(program: Program, log: Path) -> int | None:
    """The exit code; None if the program reached its limit."""
    command = [sys.executable, "-m", f"bench.programs.{program.module}", *program.arguments]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            return process.wait(program.limit_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill_all_children()


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that it can find and kill them.

    Jobs of a program run in separate sessions, and would otherwise hold the GPU during the next program.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _kill_all_children() -> None:
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=10)


def _succeeded(output: Path) -> Iterator[str]:
    file = output / "series.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        end = json.loads(line)
        if end["exit_code"] == 0:
            yield end["program"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="of the logs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all programs together")
    given = parser.parse_args()
    sys.exit(not run_series(programs_of(given.file.read_text()), given.output, given.seconds))
