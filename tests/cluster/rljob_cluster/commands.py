"""Execution of other programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rljob_cluster.errors import ClusterError

LAST_LINES = 5


def run(*command: str | Path, input: bytes | None = None) -> str:
    """Standard output of the command. Raises ClusterError with its last lines of output if it fails."""
    done = subprocess.run([str(word) for word in command], input=input, capture_output=True, check=False)
    if done.returncode != 0:
        words = " ".join(str(word) for word in command)
        output = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        raise ClusterError(f"`{words}` failed with code {done.returncode}: {chr(10).join(output)}")
    return done.stdout.decode(errors="replace")
