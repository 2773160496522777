"""A model URI becomes a local directory in Hugging Face format. Each scheme has a file of its own beside this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rljob_trainer.errors import BadInput
from rljob_trainer.models import file, hub, image_volume, random_model, volume_claim
from rljob_trainer.models.cache import default_cache_directory
from rljob_trainer.models.checkpoint import validate_checkpoint

_RESOLVE: dict[str, Callable[[str, Path], Path]] = {
    "file": file.resolve,
    "hf": hub.resolve,
    "oci": image_volume.resolve,
    "pvc": volume_claim.resolve,
    "random": random_model.resolve,
}
_MOUNTED_IN_PODS = {"oci", "pvc"}


def resolve_model(uri: str, cache_directory: Path | None = None, mounted: Path | None = None) -> Path:
    """The directory of the model that `uri` names: `config.json`, complete safetensors weights and a tokenizer.

    `cache_directory` (default: `default_cache_directory()`) keeps what is made or was put there for a URI.
    `mounted`: in a pod, the volume that holds the model of an `oci://` or `pvc://` URI.
    Raises `BadInput` where there is no such model, or where its files are missing, truncated or unreadable.
    """
    scheme, separator, location = uri.partition("://")
    if not separator or scheme not in _RESOLVE:
        raise BadInput(f"expected a model URI that begins with {_schemes()}, found {uri!r}")
    if mounted is not None and scheme in _MOUNTED_IN_PODS:
        directory = mounted
    else:
        directory = _RESOLVE[scheme](location, cache_directory or default_cache_directory())
    validate_checkpoint(directory)
    return directory


def _schemes() -> str:
    return ", ".join(f"{scheme}://" for scheme in _RESOLVE)
