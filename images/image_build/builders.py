"""Programs that build images: buildah, or docker if an engine answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from image_build.recipes import CACHE, ImageBuildError, Recipe


@dataclass(frozen=True)
class LocalImage:
    """An image in the builder's store."""

    id: str
    size: str
    """Readable size of all layers."""
    labels: Mapping[str, str]
    digest: str = ""
    """Digest of its manifest, with the algorithm; empty if the store does not know it."""


class Builder(ABC):
    """Differences between buildah and docker."""

    name: ClassVar[str]
    step: ClassVar[re.Pattern[str]]
    """Matches a line of output that names the current step of a build, in its group `step`."""
    _probe: ClassVar[Sequence[str]]
    """Command that succeeds if the builder works on this machine."""

    def fault(self) -> str | None:
        """Reason why it cannot build on this machine; None if it can."""
        if shutil.which(self.name) is None:
            return f"{self.name} is not installed"
        probe = self._run(self._probe)
        return None if probe.returncode == 0 else f"{self.name} does not work here: {probe.stderr.strip()}"

    def build_command(self, recipe: Recipe, labels: Mapping[str, str], secrets: Mapping[str, Path]) -> list[str]:
        return [
            *self._build_program(recipe),
            *(f"--build-arg={name}={value}" for name, value in recipe.arguments.items()),
            *(f"--label={name}={value}" for name, value in labels.items()),
            *(f"--secret=id={name},src={path}" for name, path in secrets.items()),
            f"--file={recipe.containerfile}",
            f"--tag={recipe.tag}",
            str(recipe.context),
        ]

    @abstractmethod
    def find(self, reference: str) -> LocalImage | None:
        """The image with this name in the local store; None if it is not there."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @abstractmethod
    def _build_program(self, recipe: Recipe) -> list[str]: ...

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=self.environment(), encoding="utf-8"
        )


class Buildah(Builder):
    name = "buildah"
    step = re.compile(r"(?P<step>(\[\d+/\d+\] )?STEP \d+/\d+: .*)")
    _probe = ("buildah", "info")

    def find(self, reference: str) -> LocalImage | None:
        listed = self._run(["buildah", "images", "--json", reference])
        if listed.returncode != 0:
            return None
        inspected = json.loads(self._run(["buildah", "inspect", "--type", "image", reference]).stdout)
        labels = inspected["OCIv1"]["config"].get("Labels") or {}
        [image] = json.loads(listed.stdout)
        return LocalImage(inspected["FromImageID"], image["size"], labels, image.get("digest") or "")

    def environment(self) -> dict[str, str]:
        """Environment for buildah without namespaces and FUSE, which root does not need and small machines lack."""
        needs_least = {"STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot"} if os.geteuid() == 0 else {}
        return needs_least | super().environment()

    def _build_program(self, recipe: Recipe) -> list[str]:
        ignore = [f"--ignorefile={recipe.ignore}"] if recipe.ignore else []
        return ["buildah", "bud", "--layers", *ignore]


class Docker(Builder):
    name = "docker"
    step = re.compile(r"#\d+ (?P<step>\[.*\d+/\d+\] .*)")
    _probe = ("docker", "version")

    def find(self, reference: str) -> LocalImage | None:
        inspected = self._run(["docker", "image", "inspect", reference])
        if inspected.returncode != 0:
            return None
        image = json.loads(inspected.stdout)[0]
        digests = image.get("RepoDigests") or [""]
        size, labels = f"{image['Size'] / 1e6:,.0f} MB", image["Config"].get("Labels") or {}
        return LocalImage(image["Id"], size, labels, digests[0].rpartition("@")[2])

    def environment(self) -> dict[str, str]:
        return super().environment() | {"DOCKER_BUILDKIT": "1"}

    def _build_program(self, recipe: Recipe) -> list[str]:
        # The ignore file next to the Containerfile has the name by which BuildKit finds it.
        return ["docker", "build", "--progress=plain"]


BUILDERS: tuple[Builder, ...] = (Buildah(), Docker())


def find_builder(wanted: str | None) -> Builder:
    """The requested builder, or the first one that works. Raises ImageBuildError with the reasons if none works."""
    faults = []
    for builder in BUILDERS:
        if wanted in (None, builder.name):
            fault = builder.fault()
            if fault is None:
                return builder
            faults.append(fault)
    raise ImageBuildError(
        "images are built with buildah, or docker with a running engine: " + "; ".join(faults)
        + ". On Debian and Ubuntu: apt-get install buildah"
    )  # fmt: skip


# Execution of long commands, with their output in a log and their current step on the terminal.

LOGS = CACHE / "images"
LAST_LINES = 20
SECONDS_BETWEEN_LINES = 10.0
WIDTH = 110


def run_with_progress(
    title: str, command: Sequence[str], *, step: re.Pattern[str], environment: Mapping[str, str]
) -> None:
    """Raises ImageBuildError with the last lines of the output if the command fails.

    `step` matches a line of output that names the current step, in its group `step`.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{title}.log"
    display = StepDisplay(title)
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    with (
        log.open("w", buffering=1, encoding="utf-8") as log_file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            errors="replace", env=environment, encoding="utf-8",
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            log_file.write(line)
            last_lines.append(line)
            if found := step.search(line):
                display.show(found["step"])
    display.clear()
    if process.returncode != 0:
        raise ImageBuildError(f"{''.join(last_lines)}\n{title}: {command[0]} failed; see the full output in {log}")


class StepDisplay:
    """A line that each step overwrites. If the output is not a terminal, at most one line every ten seconds."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._started = time.monotonic()
        self._last_line = -SECONDS_BETWEEN_LINES
        self._overwrites = sys.stdout.isatty()

    def show(self, step: str) -> None:
        seconds = time.monotonic() - self._started
        text = f"{self._title:<9}{seconds:4.0f} s  {step}"[:WIDTH]
        if self._overwrites:
            print(f"\r\033[K{text}", end="", flush=True)
        elif seconds - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = seconds
            print(text, flush=True)

    def clear(self) -> None:
        if self._overwrites:
            print("\r\033[K", end="", flush=True)
