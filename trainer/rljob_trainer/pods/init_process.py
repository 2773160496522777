"""The init of a container: passes signals on, collects the processes that nobody waits for, and leaves none behind.

A container's first process has duties that a program does not have elsewhere. The kernel delivers it no signal that it
has not asked for, and hands it every process whose parent ended: Ray's servers, which `ray start` leaves running, and
theirs. So the program goes on in a child, and the first process does nothing but these duties.
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
    """Return in a child process. This one stays as its init, and exits when the child does and as the child did, after
    `at_end` was given the exit code.

    To be called before there are threads.
    """
    _adopt_orphans()
    sys.stdout.flush()
    sys.stderr.flush()
    # Blocked before there is a child, so that none is missed; a blocked signal also reaches the first process. One that
    # came earlier, while `rljob_trainer.__main__` held it back, is passed on to the child like any other.
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
    """Collect whatever has ended; the exit code of `program` where it is among that."""
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
    """As the first process does by itself; also where the pod's processes share one namespace, which has another."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_descendants() -> None:
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(descendants, timeout=_SECONDS_TO_DIE)
