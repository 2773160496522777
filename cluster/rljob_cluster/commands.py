"""Other programs of the system, run to their end."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rljob_cluster.errors import ClusterError

LAST_LINES = 5


def run(*command: str | Path, input: bytes | None = None) -> str:
    """What the command printed. Raises ClusterError, with what it said, where it fails."""
    done = subprocess.run([str(word) for word in command], input=input, capture_output=True, check=False)
    if done.returncode != 0:
        words = " ".join(str(word) for word in command)
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        raise ClusterError(f"`{words}` failed with code {done.returncode}: {chr(10).join(said)}")
    return done.stdout.decode(errors="replace")
