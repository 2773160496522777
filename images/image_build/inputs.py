"""Inputs of an image: its files, and a key. An image with an unchanged key does not need to be rebuilt."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from image_build.recipes import Recipe


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
