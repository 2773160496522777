"""Base image for machines without a registry: a minimal Debian with its own Python, made by debootstrap."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from image_build.builders import run_with_progress
from image_build.recipes import Recipe, containerfile

SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
# Not needed in a container. The licences in usr/share/doc are kept.
LEFT_OUT = ("usr/share/man", "usr/share/info", "usr/share/locale", "var/lib/apt/lists", "var/cache", "var/log")


def is_possible() -> bool:
    """True if this machine can build the base image."""
    return shutil.which("debootstrap") is not None and os.geteuid() == 0


def tag() -> str:
    """Name of the image. It contains the inputs, so that changed inputs produce another image."""
    definition = repr((SUITE, PACKAGES, LEFT_OUT, containerfile("base").read_text(encoding="utf-8")))
    return f"localhost/rljob/base:{SUITE}-{hashlib.sha256(definition.encode()).hexdigest()[:12]}"


@contextmanager
def prepared_recipe() -> Iterator[Recipe]:
    """Builds the root file system, in about a minute. The recipe is valid only within the context."""
    with TemporaryDirectory(prefix="rljob-base-") as directory:
        root, context = Path(directory, "root"), Path(directory, "context")
        context.mkdir()
        debootstrap(root)
        leave_out_documentation(root)
        pack(root, context / "rootfs.tar")
        yield Recipe("base", tag(), containerfile("base"), context, needs_base=False)


def debootstrap(root: Path) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root)]
    run_with_progress("debian", command, step=re.compile(r"I: (?P<step>.*)"), environment=os.environ)


def leave_out_documentation(root: Path) -> None:
    for name in LEFT_OUT:
        for entry in (root / name).iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for entry in (root / "usr/share/doc").rglob("*"):
        if not entry.is_dir() and entry.name != "copyright":
            entry.unlink()


def pack(root: Path, archive: Path) -> None:
    subprocess.run(["tar", "--numeric-owner", "--create", f"--file={archive}", f"--directory={root}", "."], check=True)
