"""This machine: the device of a measurement, and programs with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rljob_trainer.hardware import visible_gpus


def device() -> str:
    """Name of the first GPU that this process may use, or of the processor with the number of usable cores."""
    gpus = visible_gpus()
    return gpus[0].name if gpus else f"{processor()}, {len(os.sched_getaffinity(0))} cores"


def processor() -> str:
    """Name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")


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


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A new cgroup with this memory limit, in which the caller writes process ids to `cgroup.procs`. Its processes are
    killed at the end. Raises OSError if this process may not create one."""
    root = Path("/sys/fs/cgroup")
    is_first_version = (root / "memory").is_dir()
    group = root / ("memory" if is_first_version else "") / f"rljob-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if is_first_version else "memory.max")).write_text(str(limit_bytes))
        yield group
    finally:
        while left := (group / "cgroup.procs").read_text().split():
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            time.sleep(0.1)
        group.rmdir()
