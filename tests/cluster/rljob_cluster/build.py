"""Build of the programs of a cluster from their Go modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rljob_cluster.binaries import SOURCES, Module
from rljob_cluster.errors import ClusterError
from rljob_cluster.progress import Progress

LOG_LINES = 8


def build(modules: Iterable[Module], directory: Path, progress: Progress) -> None:
    """Build the programs that `directory` lacks. An interrupted build resumes, because Go caches compiled packages.

    Raises ClusterError if Go is missing or a build fails.
    """
    wanted = [(module, name) for module in modules for name in module.programs if not (directory / name).exists()]
    if not wanted:
        return
    if not shutil.which("go"):
        raise ClusterError("expected the Go toolchain, 1.26 or newer, to build Kubernetes; found no `go` on the PATH")
    directory.mkdir(parents=True, exist_ok=True)
    for position, (module, name) in enumerate(wanted, 1):
        with progress.step(f"building {name}, {position} of {len(wanted)}"):
            build_program(module, name, directory / name)


def build_program(module: Module, name: str, target: Path) -> None:
    """Build one program, and move it to `target` when it is complete."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as partial:
        built = Path(partial) / name
        done = subprocess.run(
            build_command(module, name, built),
            cwd=SOURCES / module.name,
            env=os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            tail = "\n".join(done.stderr.splitlines()[-LOG_LINES:])
            raise ClusterError(f"`go build` of {name} in {SOURCES / module.name} failed:\n{tail}")
        built.replace(target)


def build_command(module: Module, name: str, output: Path) -> list[str]:
    linker_flags = f"-s -w {module.linker_flags}".strip()
    return ["go", "build", "-trimpath", "-ldflags", linker_flags, "-o", str(output), module.programs[name]]
