"""Entry point of the `rljob` command, and of `python -m rljob_client`."""

from __future__ import annotations

import os
import signal
import sys
from io import TextIOWrapper

_FIRST_PROCESSES = ("controller", "worker")
"""Commands that pods run as the first process of their container."""

_UTF_8 = "PYTHONUTF8"
"""Python's UTF-8 mode, which can only be set when it starts."""


def kubectl_plugin() -> None:
    """Run `kubectl rljob`."""
    _import_nothing_from_the_working_directory()
    _use_utf_8()
    from rljob_client.kubectl_plugin import main

    main()


def main() -> None:
    """Run the command line. It is imported only once no signal can be lost."""
    if sys.argv[1:2] and sys.argv[1] in _FIRST_PROCESSES:
        # The kernel drops a signal for which a container's first process has no handler, and the kubelet sends SIGTERM
        # once: a pod that is deleted during the imports would train to the end. A blocked signal stays pending until
        # `continue_under_init`.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    _require_working_directory()
    _import_nothing_from_the_working_directory()
    _use_utf_8()
    from rljob_client.cli import app

    sys.exit(app())


def _require_working_directory() -> None:
    """Exit with the code of an invalid command line if the working directory was deleted: child processes need one."""
    try:
        os.getcwd()
    except OSError as error:
        print(
            f"rljob: expected a working directory, found none ({error.strerror}): it was deleted, or may not be read; "
            "change to another directory (cd)",
            file=sys.stderr,
        )
        sys.exit(2)


def _import_nothing_from_the_working_directory() -> None:
    """Remove the entry of `python -m`: a `numbers.py` there would replace the module of the standard library."""
    if not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]


def _use_utf_8() -> None:
    """Read, write and name files in UTF-8 whatever the locale, in libraries and child processes too.

    Text that UTF-8 cannot express is printed as escapes.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(_UTF_8) != "1":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {_UTF_8: "1"})
    errors = {sys.stdin: "surrogateescape", sys.stdout: "backslashreplace", sys.stderr: "backslashreplace"}
    for stream, on_error in errors.items():
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=on_error)


if __name__ == "__main__":
    main()
