"""Where the `rljob` command begins; also `python -m rljob_trainer`."""

from __future__ import annotations

import signal
import sys

_FIRST_PROCESSES = ("controller", "worker")
"""Commands that pods run as the first process of their container."""


def main() -> None:
    """Imports the command line only when no signal can be lost any more."""
    if sys.argv[1:2] and sys.argv[1] in _FIRST_PROCESSES:
        # The kernel drops what a first process has no handler for, and the kubelet says SIGTERM once: a pod that is
        # deleted while it imports would train on to its end. Blocked, it waits for `continue_under_init`.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    from rljob_trainer.cli import app

    sys.exit(app())


if __name__ == "__main__":
    main()
