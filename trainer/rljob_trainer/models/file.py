"""`file:///path/to/model`: a directory on this machine."""

from __future__ import annotations

from pathlib import Path

from rljob_trainer.errors import BadInput


def resolve(location: str, _cache_directory: Path) -> Path:
    directory = Path(location)
    if not directory.is_absolute():
        raise BadInput(f"expected an absolute path, file:///path/to/model, found file://{location}")
    if not directory.is_dir():
        raise BadInput(f"expected a model directory at {directory}, found {'a file' if directory.exists() else 'none'}")
    return directory
