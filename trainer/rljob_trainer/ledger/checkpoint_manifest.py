"""`checkpoint.json`: the files of a checkpoint, with their sizes and checksums."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

MANIFEST_NAME = "checkpoint.json"

_FILE_OF_RANK = re.compile(r"__(?P<rank>\d{1,9})_.*")


class FileDigest(BaseModel):
    """Size and checksum of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int
    sha256: str


class CheckpointManifest(BaseModel):
    """Contents of `checkpoint.json`."""

    model_config = ConfigDict(frozen=True)

    step: int
    """The checkpoint holds the state after this step."""

    files: dict[str, FileDigest]
    """Digest by path relative to the checkpoint."""

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def load(cls, checkpoint: Path) -> CheckpointManifest:
        """Read it. Raises `OSError` if there is none, pydantic's `ValidationError` if it is damaged."""
        return cls.model_validate_json((checkpoint / MANIFEST_NAME).read_bytes())


def describe(checkpoint: Path, step: int, known: Mapping[str, FileDigest]) -> CheckpointManifest:
    """The manifest of the files in `checkpoint`. Reads the files that are not `known`."""
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    files = {path.relative_to(checkpoint).as_posix(): path for path in paths}
    digests = {name: known.get(name) or digest_of(path) for name, path in files.items()}
    return CheckpointManifest(step=step, files=digests)


def find_damage(checkpoint: Path, step: int, reads: Callable[[str], bool] = lambda _name: True) -> str | None:
    """A description of the damage to the checkpoint of `step`; None if every byte is as it was written.

    `reads`: selects the files to read, by their names. Only the sizes of the others are compared.
    """
    try:
        manifest = CheckpointManifest.load(checkpoint)
    except FileNotFoundError:
        return f"{MANIFEST_NAME} is missing"
    except (OSError, ValidationError) as error:
        return f"{MANIFEST_NAME} is corrupt ({type(error).__name__})"
    if manifest.step != step:
        return f"{MANIFEST_NAME} is for step {manifest.step}"
    for read in (False, True):  # the sizes first, since that is quick
        for name, digest in manifest.files.items():
            if (reads(name) or not read) and (damage := _file_damage(checkpoint / name, name, digest, read=read)):
                return damage
    return None


def writer_of(name: str) -> int | None:
    """The policy rank that has written a file; None if it is not a file of a rank."""
    match = _FILE_OF_RANK.fullmatch(name)
    return int(match["rank"]) if match else None


def share_of_reader(names: Iterable[str], rank: int, ranks: int) -> frozenset[str]:
    """The files of ranks that `rank` of `ranks` checks when they load a checkpoint.

    If as many ranks have written them, each rank checks its own files, of which it needs every byte.
    """
    written = sorted((writer, name) for name in names if (writer := writer_of(name)) is not None)
    each_rank_wrote = {writer for writer, _ in written} == set(range(ranks))
    return frozenset(
        name for place, (writer, name) in enumerate(written) if (writer if each_rank_wrote else place % ranks) == rank
    )


_LONGEST_NAME = 200
"""Maximum length of a file name in a message."""


def _file_damage(path: Path, name: str, expected: FileDigest, *, read: bool) -> str | None:
    """A description of the damage to one file. `read`: also compare its checksum."""
    name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
    try:
        size_bytes = path.stat().st_size
        if size_bytes != expected.size_bytes:
            return f"{name} has {size_bytes:,} bytes instead of {expected.size_bytes:,}"
        if read and digest_of(path).sha256 != expected.sha256:
            return f"{name} is corrupt (its checksum differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except ValueError:  # a null character
        return f"{name!r} is not a file name"
    return None


def digest_of(path: Path) -> FileDigest:
    """Size and checksum of a file, which is read."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return FileDigest(size_bytes=path.stat().st_size, sha256=sha256)
