"""Recipes of the images."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from image_build.errors import ImageBuildError

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rljob"
NAMES = ("operator", "trainer", "model")
EXAMPLES = ("trl",)
"""Images that are built only if they are named."""
DEVICES = ("cpu", "gpu")


@dataclass(frozen=True)
class Recipe:
    """Recipe of an image."""

    name: str
    """Name for the command line."""
    tag: str
    """Full name of the image."""
    containerfile: Path
    context: Path
    """Directory that COPY reads."""
    ignore: Path | None = None
    """Ignore file, which selects the files of the context. Absent: all files count."""
    needs_base: bool = True
    """True if the image is built on the base image."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Build arguments."""


def recipe(name: str, *, device: str, model_directory: Path) -> Recipe:
    match name:
        case "operator":
            return operator()
        case "trainer":
            return trainer(device)
        case "trl":
            return trl()
        case _:
            return model(model_directory)


def operator() -> Recipe:
    version = part_version("operator")
    return Recipe(
        name="operator",
        tag=f"localhost/rljob/operator:{version}",
        containerfile=containerfile("operator"),
        context=REPOSITORY,
        ignore=ignore_file("operator"),
        arguments={"VERSION": version},
    )


def trainer(device: str) -> Recipe:
    version = part_version("trainer")
    return Recipe(
        name="trainer",
        tag=f"localhost/rljob/trainer:{version}-{device}",
        containerfile=containerfile("trainer"),
        context=REPOSITORY,
        ignore=ignore_file("trainer"),
        arguments={
            "VERSION": version,
            "DEVICE": device,
            "TORCH_VERSION": locked_version("torch", f"trainer-{device}.txt"),
        },
    )


def trl() -> Recipe:
    """Recipe of an image on top of the trainer image for CPUs, which must exist."""
    version = locked_version("trl", "trl.txt")
    return Recipe(
        name="trl",
        tag=f"localhost/rljob/trl:{version}",
        containerfile=containerfile("trl"),
        context=REPOSITORY,
        ignore=ignore_file("trl"),
        needs_base=False,
        arguments={"VERSION": version, "TRAINER_IMAGE": trainer("cpu").tag},
    )


def model(directory: Path) -> Recipe:
    """Recipe of the model in a directory that ends in `<registry>/<repository>/<tag>`, as in the trainer's model
    cache."""
    if not (directory / "config.json").is_file():
        raise ImageBuildError(f"expected a model in {directory}, found no config.json: run `make model`")
    title, version = directory.parts[-2:]
    return Recipe(
        name="model",
        tag=f"{'/'.join(directory.parts[-4:-1])}:{version}",
        containerfile=containerfile("model"),
        context=directory,
        needs_base=False,
        arguments={"TITLE": title, "VERSION": version},
    )


def containerfile(name: str) -> Path:
    return REPOSITORY / "images" / name / "Containerfile"


def ignore_file(name: str) -> Path:
    return containerfile(name).with_name("Containerfile.dockerignore")


def part_version(part: str) -> str:
    return str(tomllib.loads((REPOSITORY / part / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def locked_version(package: str, requirements: str) -> str:
    """The version of a package in a requirement file."""
    pin = re.search(
        rf"^{re.escape(package)}==(\S+)",
        (REPOSITORY / "requirements" / requirements).read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    if pin is None:
        raise ImageBuildError(f"requirements/{requirements} does not pin {package}: run `make lock`")
    return pin[1]
