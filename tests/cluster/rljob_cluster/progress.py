"""Progress messages on the terminal, with durations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as LiveDisplay
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn


class Progress:
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
