"""Execution of long commands, with their output in a log and their current step on the terminal."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence

from image_build.errors import ImageBuildError
from image_build.recipes import CACHE

LOGS = CACHE / "images"
LAST_LINES = 20
SECONDS_BETWEEN_LINES = 10.0
WIDTH = 110


def run_with_progress(
    title: str, command: Sequence[str], *, step: re.Pattern[str], environment: Mapping[str, str]
) -> None:
    """Raises ImageBuildError with the last lines of the output if the command fails.

    `step` matches a line of output that names the current step, in its group `step`.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{title}.log"
    display = StepDisplay(title)
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    with (
        log.open("w", buffering=1, encoding="utf-8") as log_file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            errors="replace", env=environment, encoding="utf-8",
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            log_file.write(line)
            last_lines.append(line)
            if found := step.search(line):
                display.show(found["step"])
    display.clear()
    if process.returncode != 0:
        raise ImageBuildError(f"{''.join(last_lines)}\n{title}: {command[0]} failed; see the full output in {log}")


class StepDisplay:
    """A line that each step overwrites. If the output is not a terminal, at most one line every ten seconds."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._started = time.monotonic()
        self._last_line = -SECONDS_BETWEEN_LINES
        self._overwrites = sys.stdout.isatty()

    def show(self, step: str) -> None:
        seconds = time.monotonic() - self._started
        text = f"{self._title:<9}{seconds:4.0f} s  {step}"[:WIDTH]
        if self._overwrites:
            print(f"\r\033[K{text}", end="", flush=True)
        elif seconds - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = seconds
            print(text, flush=True)

    def clear(self) -> None:
        if self._overwrites:
            print("\r\033[K", end="", flush=True)
