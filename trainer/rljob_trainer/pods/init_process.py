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

import psutil

_PASSED_ON = {signal.SIGTERM, signal.SIGINT}
_AWAITED = {*_PASSED_ON, signal.SIGCHLD}
_PR_SET_CHILD_SUBREAPER = 36
_SECONDS_TO_DIE = 10.0


def continue_under_init(at_end: Callable[[int], None] = lambda _: None) -> None:
    """Fork, and return in the child. The parent stays as its init process and exits with the child's exit code.

    `at_end`: called with the exit code before the parent exits. Call this before any thread is started.
    """
    _adopt_orphans()
    sys.stdout.flush()
    sys.stderr.flush()
    # Blocked before the fork, so that no signal is missed. A blocked signal also reaches the first process. One that
    # arrived earlier, while `rljob_client.__main__` blocked it, is forwarded to the child like any other.
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    program = os.fork()
    if program == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        return
    exit_code = _watch(program)
    _kill_descendants()
    at_end(exit_code)
    os._exit(exit_code)


def _watch(program: int) -> int:
    while True:
        number = signal.sigwait(_AWAITED)
        if number in _PASSED_ON:
            os.kill(program, number)
        elif (exit_code := _reap(program)) is not None:
            return exit_code


def _reap(program: int) -> int | None:
    """Reap all exited processes. Returns the exit code of `program` if it is one of them."""
    ended = None
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if process == 0:
            return ended
        if process == program:
            code = os.waitstatus_to_exitcode(status)
            ended = code if code >= 0 else 128 - code


def _adopt_orphans() -> None:
    """Become the parent of orphans, also if this is not the first process because the pod shares its namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_descendants() -> None:
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(descendants, timeout=_SECONDS_TO_DIE)
