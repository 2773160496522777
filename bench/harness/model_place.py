"""A directory for a model that is as large as a small disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rljob_api.job import RLJobSpec
from rljob_memory.planning.model_size import shape_in_uri
from rljob_trainer.models.random_model import cache_key, parse_query
from rljob_trainer.models.resolve import default_cache_directory, resolve_model

MEMORY = Path("/dev/shm/rljob-models")
_SPARE_BYTES = 4 << 30
"""Of a disk, for logs and compiled kernels."""


def written_model(job: dict[str, Any]) -> Path:
    """The directory of the `random://` model in the spec `job`, which is written if it does not exist."""
    spec = RLJobSpec.model_validate(job, by_alias=True, by_name=False)
    shape = shape_in_uri(spec, bytes_per_parameter=2)
    assert shape is not None, "the arms name the sizes of their models"
    return resolve_model(spec.model.uri, cache_with_room(spec.model.uri, shape.weight_bytes))


def cache_with_room(uri: str, model_bytes: int) -> Path:
    """The model cache on the disk, or one in memory if the disk has neither the model nor room for it.

    A model in memory needs no copy there while the policy's weights make room for the engine.
    """
    disk = default_cache_directory()
    existing = next(place for place in (disk, *disk.parents) if place.exists())
    is_there = (disk / "random" / cache_key(parse_query(uri.removeprefix("random://")))).is_dir()
    return disk if is_there or shutil.disk_usage(existing).free >= model_bytes + _SPARE_BYTES else MEMORY
