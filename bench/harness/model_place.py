"""A directory for a model that is as large as a small disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from rljob_trainer.models.random_model import cache_key, parse_query
from rljob_trainer.models.resolve import default_cache_directory, resolve_model

MEMORY = Path("/dev/shm/rljob-models")
_SPARE_BYTES = 4 << 30
"""Of a disk, for logs and compiled kernels."""


def written_model(uri: str, model_bytes: int) -> Path:
    """The directory of a `random://` model, which is written if it does not exist."""
    return resolve_model(uri, cache_with_room(uri, model_bytes))


def cache_with_room(uri: str, model_bytes: int, disk: Path | None = None, memory: Path = MEMORY) -> Path:
    """The model cache on the disk, or one in memory if the disk has neither the model nor room for it.

    A model in memory needs no copy there while the policy's weights make room for the engine.
    """
    disk = disk or default_cache_directory()
    existing = next(place for place in (disk, *disk.parents) if place.exists())
    is_there = (disk / "random" / cache_key(parse_query(uri.removeprefix("random://")))).is_dir()
    return disk if is_there or shutil.disk_usage(existing).free >= model_bytes + _SPARE_BYTES else memory
