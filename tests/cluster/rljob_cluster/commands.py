"""Execution of other programs, with progress on the terminal and errors in one line."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as LiveDisplay
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn


class ClusterError(Exception):
    """An error of a cluster. Its message states what was expected, what was found and what to do."""


LAST_LINES = 5


def run(*command: str | Path, input: bytes | None = None) -> str:
    """Standard output of the command. Raises ClusterError with its last lines of output if it fails."""
    done = subprocess.run([str(word) for word in command], input=input, capture_output=True, check=False)
    if done.returncode != 0:
        words = " ".join(str(word) for word in command)
        output = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        raise ClusterError(f"`{words}` failed with code {done.returncode}: {chr(10).join(output)}")
    return done.stdout.decode(errors="replace")


# Progress messages on the terminal, with durations.


class ProgressLines:
    """Prints one line per step, with its seconds. On a terminal, the line counts the seconds while the step runs."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with LiveDisplay(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as live:
            live.add_task(what)
            yield
        self.say(f"{what}: {time.monotonic() - began:.1f} s")

    def say(self, what: str) -> None:
        self.console.print(what, highlight=False)
