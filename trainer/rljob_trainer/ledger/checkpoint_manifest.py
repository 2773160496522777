"""`checkpoint.json`: the files of a checkpoint, with their sizes and checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

MANIFEST_NAME = "checkpoint.json"


class FileDigest(BaseModel):
    """Size and checksum of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int
    sha256: str


class CheckpointManifest(BaseModel):
    """Contents of `checkpoint.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """The checkpoint holds the state after this step."""

    metadata: dict[str, Any]
    """Data of the writer, for the resume."""

    files: dict[str, FileDigest]
    """By path relative to the checkpoint."""

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def load(cls, checkpoint: Path) -> CheckpointManifest:
        """Read it. Raises `OSError` if there is none, pydantic's `ValidationError` if it is damaged."""
        return cls.model_validate_json((checkpoint / MANIFEST_NAME).read_bytes())


def describe(checkpoint: Path, step: int, metadata: dict[str, Any]) -> CheckpointManifest:
    """The manifest of the files in `checkpoint`."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    digests = {path.relative_to(checkpoint).as_posix(): _digest(path) for path in files}
    return CheckpointManifest(step=step, metadata=metadata, files=digests)


def find_damage(checkpoint: Path, step: int) -> str | None:
    """A description of the damage to the checkpoint of `step`; None if every byte is as it was written."""
    try:
        manifest = CheckpointManifest.load(checkpoint)
    except FileNotFoundError:
        return f"{MANIFEST_NAME} is missing"
    except (OSError, ValidationError) as error:
        return f"{MANIFEST_NAME} is corrupt ({type(error).__name__})"
    if manifest.step != step:
        return f"{MANIFEST_NAME} is of step {manifest.step}"
    damages = (_find_file_damage(checkpoint / name, name, digest) for name, digest in manifest.files.items())
    return next((damage for damage in damages if damage), None)


def _find_file_damage(path: Path, name: str, expected: FileDigest) -> str | None:
    try:
        size_bytes = path.stat().st_size
        if size_bytes != expected.size_bytes:
            return f"{name} has {size_bytes:,} bytes instead of {expected.size_bytes:,}"
        if _digest(path).sha256 != expected.sha256:
            return f"{name} is corrupt (its checksum differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


def _digest(path: Path) -> FileDigest:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return FileDigest(size_bytes=path.stat().st_size, sha256=sha256)
