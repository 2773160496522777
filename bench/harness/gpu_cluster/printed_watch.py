"""The output of `kubectl get rljobs -w`, with seconds."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def printed_watch(kubectl: list[str], path: Path, seconds: Callable[[], float]) -> Iterator[None]:
    """Write the output to `path` within the block. `seconds`: printed before each line."""
    with subprocess.Popen([*kubectl, "get", "rljobs", "--watch"], stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        reader = threading.Thread(target=_copy, args=(watch.stdout, path, seconds))
        reader.start()
        try:
            yield
        finally:
            watch.terminate()
            reader.join()


def _copy(lines: IO[str], path: Path, seconds: Callable[[], float]) -> None:
    with path.open("w") as file:
        for line in lines:
            file.write(f"{seconds():6.1f}  {line}")
