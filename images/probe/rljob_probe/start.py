"""Start of the probe in every Python process of the container.

It registers one function to run at exit, and one import hook that waits for torch. This module only imports modules
that a bare interpreter has loaded already; the others are imported after memory ran out.
"""

from __future__ import annotations

import atexit
import os
import sys

from rljob_probe import cgroup, notes
from rljob_probe.import_hooks import when_torch_is_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

DEFAULT_LOG = "/dev/termination-log"
FIRST_PROCESS = "RLJOB_PROBE_FIRST"
"""Variable with the id of the process that started all others of the program."""


def start() -> None:
    """Start the adapter, if the job names one, and the probe. There is no probe without a termination log."""
    if os.environ.get("RLJOB_ADAPTER"):
        _install_adapter()
    log = os.environ.get("RLJOB_TERMINATION_LOG", "")
    if not log and not os.path.exists(DEFAULT_LOG):
        return
    own_pid = str(os.getpid())
    first_pid = os.environ.setdefault(FIRST_PROCESS, own_pid)
    atexit.register(_at_exit, log or DEFAULT_LOG, first_pid, cgroup.oom_kills())
    when_torch_is_imported(_observe)


def _install_adapter() -> None:
    """Install the adapter. If that fails, the program runs with its own options."""
    try:
        from rljob_probe.adapters import install

        install()
    except Exception as error:
        print(f"rljob: the adapter cannot start: {error!r}; the memory plan changes no option", file=sys.stderr)


def _observe(torch: ModuleType) -> None:
    from rljob_probe.observer import observe, watch_engine_start

    watch_engine_start()  # vLLM imports torch before its own modules
    observe(torch)


def _at_exit(log: str, first_pid: str, kills_at_start: int) -> None:
    """Report the exit. This uses atexit because programs replace sys.excepthook; sys.last_value is still set at
    exit."""
    try:
        first = first_pid == str(os.getpid())
        kills = cgroup.oom_kills() - kills_at_start if first else 0
        error = getattr(sys, "last_value", None)
        if error is not None or kills or notes.has_any():
            from rljob_probe.explanation import report_exit

            report_exit(log, error, first=first, kills=kills)
    except Exception:
        pass
