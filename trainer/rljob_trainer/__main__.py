"""Entry point of the `rljob` command, and of `python -m rljob_trainer`."""

from __future__ import annotations

import signal
import sys

_FIRST_PROCESSES = ("controller", "worker")
"""Commands that pods run as the first process of their container."""


def main() -> None:
    """Run the command line. It is imported only once no signal can be lost."""
    if sys.argv[1:2] and sys.argv[1] in _FIRST_PROCESSES:
        # The kernel drops a signal for which a container's first process has no handler, and the kubelet sends SIGTERM
        # once: a pod that is deleted during the imports would train to the end. A blocked signal stays pending until
        # `continue_under_init`.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    from rljob_trainer.cli import app

    sys.exit(app())


if __name__ == "__main__":
    main()
