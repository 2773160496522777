"""A program that is given only so much time, and of which nothing is left where that is not enough."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil


def run_for(command: Sequence[str | Path], log: Path, seconds: float, variables: Mapping[str, str]) -> int | None:
    """The exit code of `command`, or None where it had to be ended after `seconds`.

    `log`: gets all that it prints. `variables`: its whole environment. Its children are ended with it, as they may hold
    memory of the GPU.
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
