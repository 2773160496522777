"""What happens in every Python process of the container as it starts: almost nothing.

It registers one function for the exit and one look at the imports, which waits for torch. Imported here is only what a
bare interpreter has loaded already; the rest comes when memory has run out.
"""

from __future__ import annotations

import atexit
import os
import sys

from rljob_probe import cgroup, notes
from rljob_probe.torch_import import when_torch_is_there

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

DEFAULT_LOG = "/dev/termination-log"
FIRST_PROCESS = "RLJOB_PROBE_FIRST"
"""Variable with the pid of the process that all others of the program come from."""


def start() -> None:
    """Does nothing where there is nowhere to write a termination message."""
    log = os.environ.get("RLJOB_TERMINATION_LOG", "")
    if not log and not os.path.exists(DEFAULT_LOG):
        return
    own_pid = str(os.getpid())
    first_pid = os.environ.setdefault(FIRST_PROCESS, own_pid)
    atexit.register(_at_exit, log or DEFAULT_LOG, first_pid, cgroup.oom_kills())
    when_torch_is_there(_observe)


def _observe(torch: ModuleType) -> None:
    from rljob_probe.observer import observe

    observe(torch)


def _at_exit(log: str, first_pid: str, kills_at_start: int) -> None:
    """atexit and not sys.excepthook: programs replace that one, and what it is given is still there at the exit."""
    try:
        first = first_pid == str(os.getpid())
        kills = cgroup.oom_kills() - kills_at_start if first else 0
        error = getattr(sys, "last_value", None)
        if error is not None or kills or notes.left():
            from rljob_probe.account import tell_why_it_ended

            tell_why_it_ended(log, error, first=first, kills=kills)
    except Exception:
        pass
