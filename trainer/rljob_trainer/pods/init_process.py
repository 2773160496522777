"""An init process for containers: forwards signals, reaps orphans, and kills what remains at the end.

A container's first process has special duties. The kernel delivers only signals that it handles, and makes it the
parent of every orphan: the servers that `ray start` leaves running, and their children. Therefore the program runs in a
child, and the first process only performs these duties.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import psutil

_FORWARDED = (signal.SIGTERM, signal.SIGINT)
_PR_SET_CHILD_SUBREAPER = 36
_SECONDS_TO_DIE = 10.0


def continue_under_init(at_end: Callable[[int], None] = lambda _: None) -> None:
    """Fork, and return in the child. The parent stays as its init process and exits with the child's exit code.

    `at_end`: called with the exit code before the parent exits. Call this before any thread is started.
    """
    # Adopt orphans, also if this is not the first process because the pod shares its namespace.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.stdout.flush()
    sys.stderr.flush()
    # Blocked before the fork, so that no signal is missed. A blocked signal also reaches the first process. One that
    # arrived earlier, while `rljob_client.__main__` blocked it, is forwarded to the child like any other.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    program = os.fork()
    if program == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        return
    exit_code = _wait_for(program)
    _kill_descendants()
    at_end(exit_code)
    os._exit(exit_code)


def _wait_for(program: int) -> int:
    """Forward signals to `program`, and reap all exited processes, until it exits. Returns its exit code."""

    def forward(number: int, _frame: FrameType | None) -> None:
        os.kill(program, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while True:
        # Not reaped before signals are blocked: another process could get its id.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        if ended.si_pid == program:
            signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        _, status = os.waitpid(ended.si_pid, 0)
        if ended.si_pid == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _kill_descendants() -> None:
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(descendants, timeout=_SECONDS_TO_DIE)
