"""Builds the images, and runs one with runc as a restricted pod would: its user, a read-only root, no capabilities."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rljob_testing.patience import PATIENCE_SECONDS
from rljob_testing.repository import ROOT

NEEDED_PROGRAMS = ("buildah", "runc")
BUILDAH_ENVIRONMENT = os.environ | {"STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot"}


def missing() -> str | None:
    """The prerequisite of containers that this machine lacks; None if it lacks nothing."""
    if os.geteuid() != 0:
        return "running containers needs root"
    absent = [program for program in NEEDED_PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def build_images(*names: str) -> None:
    """Bring images up to date; minutes where nothing is cached. Two processes would build the same layers twice."""
    with (Path(tempfile.gettempdir()) / "rljob-images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, str(ROOT / "images" / "build"), *names]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr


def buildah(*arguments: str) -> str:
    return subprocess.run(
        ["buildah", *arguments], capture_output=True, text=True, check=True, env=BUILDAH_ENVIRONMENT
    ).stdout.strip()


class ImageContainer:
    """An image, unpacked once, in which commands run as separate containers."""

    def __init__(self, rootfs: Path, image: Mapping[str, Any], scratch: Path) -> None:
        self.rootfs = rootfs
        self.config: Mapping[str, Any] = image["config"]
        self.history: Sequence[Mapping[str, Any]] = image["history"]
        self._scratch = scratch

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        volumes: Mapping[Path, str] | None = None,
        timeout: float = PATIENCE_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command; writable are /tmp, /dev/shm, the home, and the folders of this machine in `volumes`."""
        bundle = self._scratch / uuid.uuid4().hex
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(self._specification(command, environment or {}, volumes or {})))
        name = f"rljob-{bundle.name}"
        # Not /run/runc: the cluster's tests look whether the cluster has left such a folder.
        runc = ["runc", "--root", str(self._scratch / "runc")]
        try:
            return subprocess.run(
                [*runc, "run", "--bundle", str(bundle), name],
                capture_output=True, text=True, check=False, timeout=timeout, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            subprocess.run([*runc, "delete", "--force", name], capture_output=True, check=False)

    def _specification(
        self, command: Sequence[str], environment: Mapping[str, str], volumes: Mapping[Path, str]
    ) -> dict[str, Any]:
        user, _, group = self.config["User"].partition(":")
        writable = ["nosuid", "nodev", f"uid={user}", f"gid={group}", "mode=755"]
        variables = list(self.config["Env"]) + [f"{name}={value}" for name, value in environment.items()]
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": int(user), "gid": int(group)},
                "args": list(command),
                "env": variables,
                "cwd": self.config["WorkingDir"],
                "capabilities": {},
                "noNewPrivileges": True,
            },
            "root": {"path": str(self.rootfs), "readonly": True},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                {
                    "destination": "/dev/shm",
                    "type": "tmpfs",
                    "source": "shm",
                    "options": ["nosuid", "nodev", "mode=1777"],
                },
                {"destination": "/sys", "type": "bind", "source": "/sys", "options": ["rbind", "ro"]},
                *(
                    {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": writable}
                    for path in ("/tmp", "/home/rljob")
                ),
                *(
                    {"destination": target, "type": "bind", "source": str(source), "options": ["bind", "rw"]}
                    for source, target in volumes.items()
                ),
            ],
            # The network is the machine's: an image needs none but the loopback.
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]},
        }


@contextmanager
def image_container(reference: str, scratch: Path) -> Iterator[ImageContainer]:
    """Mounts a local image for as long as the context lasts."""
    image = json.loads(buildah("inspect", "--type", "image", reference))["OCIv1"]
    container = buildah("from", reference)
    try:
        yield ImageContainer(Path(buildah("mount", container)), image, scratch)
    finally:
        buildah("rm", container)
