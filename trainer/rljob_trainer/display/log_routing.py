"""Keeps what libraries print off the screen: it goes to a file, and only the run's own display to the terminal.

Ray, vLLM and NCCL write to the file descriptors 1 and 2, some of it from C++ and from child processes, so those are
what is pointed elsewhere. `sys.stdout` and `sys.stderr` follow, since they write to the same descriptors.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

from rljob_trainer.ledger.durable_files import writing


@dataclass(frozen=True, slots=True)
class Terminal:
    """The streams that the process was started with. They stay open after the routing ends, and write to the same."""

    stdout: TextIO
    stderr: TextIO


@contextmanager
def route_library_logs(log: Path, job: str) -> Iterator[Terminal]:
    """Send everything printed in the block, and by processes started in it, to the end of `log`.

    Yields the terminal's own streams. structlog writes JSON lines with the job's name to `log`. An exception that
    leaves the block leaves its traceback there too.
    """
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        log_descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    _flush_standard_streams()
    terminal = Terminal(_stream_of(os.dup(1)), _stream_of(os.dup(2)))
    os.dup2(log_descriptor, 1)
    os.dup2(log_descriptor, 2)
    if isinstance(sys.stdout, TextIOWrapper):
        # Into a file or a pipe Python writes in large blocks: out of order with the others, and lost by a kill.
        sys.stdout.reconfigure(line_buffering=True)
    try:
        with open(log_descriptor, "w", buffering=1, encoding="utf-8") as log_file, _structlog_to(log_file, job):
            try:
                yield terminal
            except BaseException:
                with suppress(OSError):
                    traceback.print_exc(file=log_file)
                raise
    finally:
        _flush_standard_streams()
        os.dup2(terminal.stdout.fileno(), 1)
        os.dup2(terminal.stderr.fileno(), 2)


def crash_report(error: BaseException, log: Path) -> str:
    """An unexpected error in three lines for the terminal: what, where, and which file has the rest."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "rljob_trainer" in frame.filename]
    where = [f"  at {frame.filename}:{frame.lineno}, in {frame.name}" for frame in (own or list(frames))[-1:]]
    message = "".join(traceback.format_exception_only(error)).strip()
    return "\n".join([f"unexpected {message}", *where, f"  the whole traceback is in {log}"])


def _stream_of(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="replace")


def _flush_standard_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A log on a full disk must not replace the error that is being reported.
        with suppress(OSError, ValueError):
            stream.flush()


@contextmanager
def _structlog_to(log_file: TextIO, job: str) -> Iterator[None]:
    def add_job(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {"job": job, **event}

    before = structlog.get_config()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_job,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(log_file),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)
