"""Runs a program with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil


def run_for(command: Sequence[str | Path], log: Path, seconds: float, variables: Mapping[str, str]) -> int | None:
    """Exit code of `command`; None if it was killed after `seconds`.

    `log`: file for its output. `variables`: its whole environment. Its children are killed with it, because they may
    hold GPU memory.
    """
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        children: list[psutil.Process] = []
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            # Some, Ray's among them, are in sessions of their own.
            children = psutil.Process(process.pid).children(recursive=True)
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()
