"""`checkpoint.json`: which files a checkpoint consists of, and how to tell that they are as they were written."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

MANIFEST_NAME = "checkpoint.json"


class FileDigest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int
    sha256: str


class CheckpointManifest(BaseModel):
    """`files`: by path relative to the checkpoint. `metadata`: what the writer wants to know at a resume."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    metadata: dict[str, Any]
    files: dict[str, FileDigest]

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def load(cls, checkpoint: Path) -> CheckpointManifest:
        """Raises `OSError` where there is none, pydantic's `ValidationError` where it is damaged."""
        return cls.model_validate_json((checkpoint / MANIFEST_NAME).read_bytes())


def describe(checkpoint: Path, step: int, metadata: dict[str, Any]) -> CheckpointManifest:
    """The manifest of the files that lie in `checkpoint` now."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    digests = {path.relative_to(checkpoint).as_posix(): _digest(path) for path in files}
    return CheckpointManifest(step=step, metadata=metadata, files=digests)


def find_damage(checkpoint: Path, step: int) -> str | None:
    """What is wrong with the checkpoint of `step`, in one clause; None where every byte is as it was written."""
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
            return f"{name} has {size_bytes:,} bytes, {expected.size_bytes:,} were written"
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
