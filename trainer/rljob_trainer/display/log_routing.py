"""Redirects the output of libraries to a log file, so that the terminal shows only the run's own display.

Ray, vLLM and NCCL write to the file descriptors 1 and 2, also from C++ and from child processes. Therefore the
descriptors are redirected; `sys.stdout` and `sys.stderr` write to the same ones.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

from rljob_client.run_directory.durable_files import DISK_FULL, writing


@contextmanager
def route_library_logs(log: Path, job: str) -> Iterator[TextIO]:
    """Append everything that is printed in the block, and by processes started in it, to `log`.

    Yields the original standard output, which stays open afterwards. structlog writes JSON lines with the job's name to
    `log`. The traceback of an exception that leaves the block is written there too.
    """
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        log_descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    _flush_standard_streams()
    terminal, stderr = _stream_of(os.dup(1)), os.dup(2)
    os.dup2(log_descriptor, 1)
    os.dup2(log_descriptor, 2)
    if isinstance(sys.stdout, TextIOWrapper):
        # Python buffers output to files: it would appear out of order, and be lost if the process is killed.
        sys.stdout.reconfigure(line_buffering=True)
    try:
        with _stream_of(log_descriptor) as log_file, _structlog_to(log_file, job):
            try:
                yield terminal
            except BaseException:
                traceback.print_exc(file=log_file)
                raise
    finally:
        _flush_standard_streams()
        os.dup2(terminal.fileno(), 1)
        os.dup2(stderr, 2)
        os.close(stderr)


def crash_report(error: BaseException, log: Path) -> str:
    """An unexpected error in three lines: the error, its location, and the file with the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if any(part in frame.filename for part in ("rljob_client", "rljob_trainer"))]
    where = [f"  at {frame.filename}:{frame.lineno}, in {frame.name}" for frame in (own or list(frames))[-1:]]
    message = "".join(traceback.format_exception_only(error)).strip()
    return "\n".join([f"unexpected {message}", *where, f"  the full traceback is in {log}"])


_UNWRITABLE = DISK_FULL | {errno.EPIPE, errno.EIO}
"""Errors of a full disk, of a pipe without a reader, and of a terminal that was closed."""


class _LossyFile(FileIO):
    """Drops what cannot be written: a log must not replace the failure that is being reported, and a terminal that is
    gone must not end the run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _UNWRITABLE:
                return memoryview(data).nbytes
            raise


def _stream_of(descriptor: int) -> TextIO:
    raw = BufferedWriter(_LossyFile(descriptor, "w"))
    return TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


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
