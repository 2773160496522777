"""Python programs that wait before they begin, as on a busy machine."""

from __future__ import annotations

import os
from pathlib import Path

_HOLD = """
import os, sys, time

if any(word.endswith({programs!r}) for word in sys.orig_argv):
    parent = os.getppid()
    while os.getppid() == parent and not os.path.exists({until!r}):
        time.sleep(0.01)
"""


def path_that_holds(programs: tuple[str, ...], directory: Path, until: Path) -> str:
    """PYTHONPATH of processes in which Python begins no program of one of these file names before the file `until`
    exists. A program whose parent has ended is not held.

    `directory`: for the module that Python imports at its start.
    """
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(_HOLD.format(programs=programs, until=str(until)))
    return os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))
