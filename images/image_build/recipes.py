"""Recipes of the images, the inputs that decide whether an image is up to date, and its commit."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# The error that is printed as one line instead of a traceback.


class ImageBuildError(Exception):
    """An error of a build. Its message states what was expected, what was found and what to do."""


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
    return of_repository("operator", version, {"VERSION": version})


def trainer(device: str) -> Recipe:
    version, torch_version = part_version("trainer"), locked_version("torch", f"trainer-{device}.txt")
    arguments = {"VERSION": version, "DEVICE": device, "TORCH_VERSION": torch_version}
    return of_repository("trainer", f"{version}-{device}", arguments)


def trl() -> Recipe:
    """Recipe of an image on top of the trainer image for CPUs, which must exist."""
    version = locked_version("trl", "trl.txt")
    return of_repository("trl", version, {"VERSION": version, "TRAINER_IMAGE": trainer("cpu").tag}, needs_base=False)


def of_repository(name: str, version: str, arguments: Mapping[str, str], *, needs_base: bool = True) -> Recipe:
    """Recipe of an image with files of the repository, as its ignore file selects them."""
    return Recipe(
        name=name,
        tag=f"localhost/rljob/{name}:{version}",
        containerfile=containerfile(name),
        context=REPOSITORY,
        ignore=containerfile(name).with_name("Containerfile.dockerignore"),
        needs_base=needs_base,
        arguments=arguments,
    )


def model(directory: Path) -> Recipe:
    """Recipe of the model in a directory that ends in `<registry>/<repository>/<tag>`, as in the trainer's model
    cache. Raises ImageBuildError if it has no model."""
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


def part_version(part: str) -> str:
    return str(tomllib.loads((REPOSITORY / part / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def locked_version(package: str, requirements: str) -> str:
    """The version of a package in a requirement file. Raises ImageBuildError if the file does not pin it."""
    pin = re.search(
        rf"^{re.escape(package)}==(\S+)",
        (REPOSITORY / "requirements" / requirements).read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    if pin is None:
        raise ImageBuildError(f"requirements/{requirements} does not pin {package}: run `make lock`")
    return pin[1]


# Inputs of an image: its files, and a key. An image with an unchanged key does not need to be rebuilt.


def input_files(recipe: Recipe) -> list[Path]:
    """Files that are visible to the recipe's COPY instructions, sorted."""
    if recipe.ignore is None:
        return sorted(path for path in recipe.context.rglob("*") if path.is_file())
    kept, left_out = read_ignore_file(recipe.ignore.read_text(encoding="utf-8"))
    return sorted(path for path in _files_under(recipe.context, kept) if not _matches(path, left_out))


def read_ignore_file(text: str) -> tuple[list[str], list[str]]:
    """Paths that an allow-list of the form `*`, `!kept`…, `**/excluded`… keeps, and the names that it excludes."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    left_out = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    return kept, left_out


def content_key(recipe: Recipe, base_id: str) -> str:
    """Hexadecimal SHA-256 of all inputs of the image: Containerfile, files, arguments, id of the base image."""
    digest = hashlib.sha256()
    digest.update(json.dumps([sorted(recipe.arguments.items()), base_id]).encode())
    for path in [recipe.containerfile, *input_files(recipe)]:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        executable = bool(path.stat().st_mode & 0o100)
        name = path.relative_to(recipe.context) if path.is_relative_to(recipe.context) else path.name
        digest.update(json.dumps([str(name), executable, content]).encode())
    return digest.hexdigest()


def _files_under(context: Path, kept: Iterable[str]) -> Iterator[Path]:
    for name in kept:
        path = context / name
        if path.is_file():
            yield path
        else:
            yield from (file for file in path.rglob("*") if file.is_file())


def _matches(path: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(part, pattern) for part in path.parts for pattern in patterns)


# Commit and repository of an image.


def revision(repository: Path, files: Sequence[Path]) -> str:
    """The last commit that changed one of the files, with `-dirty` if one differs from it; "unknown" without git.

    An image whose files did not change keeps its revision, and with it its id, from commit to commit.
    """
    names = [str(file) for file in files]
    commit = _git(repository, "log", "-1", "--format=%H", "--", *names)
    if not commit:
        return "unknown"
    return f"{commit}-dirty" if _git(repository, "status", "--porcelain", "--", *names) else commit


def source(repository: Path) -> str:
    """Public URL of the repository; empty if `origin` is a path or contains credentials."""
    origin = _git(repository, "remote", "get-url", "origin")
    return origin if re.fullmatch(r"https://[^@\s]+", origin) else ""


def _git(repository: Path, *arguments: str) -> str:
    try:
        git = subprocess.run(
            ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False, encoding="utf-8"
        )
    except FileNotFoundError:
        return ""
    return git.stdout.strip() if git.returncode == 0 else ""
