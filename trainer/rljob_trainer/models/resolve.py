"""Resolves model URIs to local directories in Hugging Face format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote

from rljob_client.errors import BadInput
from rljob_trainer.models import hub, random_model
from rljob_trainer.models.checkpoint import validate_checkpoint

_MOUNTED_IN_PODS = {"oci", "pvc"}


class ModelElsewhere(BadInput):
    """The model may exist in a cluster, and is not on this machine."""


Accept = Callable[[Path], None]
"""Raises `BadInput` for a directory with the configuration and the tokenizer of a model that the job cannot use."""


def resolve_model(
    uri: str,
    cache_directory: Path | None = None,
    mounted: Path | None = None,
    accept: Accept = lambda _directory: None,
) -> Path:
    """The directory of the model, with `config.json`, complete safetensors weights and a tokenizer.

    `cache_directory`: for `random://` and `oci://` URIs; default: `default_cache_directory()`.
    `mounted`: in a pod, the volume with the model of an `oci://` or `pvc://` URI.
    `accept`: called before weights are downloaded or generated, and only then.
    Raises `BadInput` if there is no such model, or if its files are missing, truncated or unreadable.
    """
    scheme, separator, location = uri.partition("://")
    if not separator or scheme not in _RESOLVE:
        schemes = ", ".join(f"{scheme}://" for scheme in _RESOLVE)
        raise BadInput(f"expected a model URI that begins with {schemes}, found {uri!r}")
    try:
        if mounted is not None and scheme in _MOUNTED_IN_PODS:
            directory = mounted
        else:
            directory = _RESOLVE[scheme](location, cache_directory or default_cache_directory(), accept)
        validate_checkpoint(directory)
    except OSError as error:  # of a parent that this user may not enter, or of a name that is too long
        raise BadInput(
            f"expected a model that this user can read at {uri}, found: {error.strerror or error}; correct the URI, or "
            "the permissions of the directory and its parents"
        ) from error
    return directory


def default_cache_directory() -> Path:
    """`$XDG_CACHE_HOME/rljob`, else `~/.cache/rljob`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob"


def _resolve_image(location: str, cache_directory: Path, _accept: Accept) -> Path:
    """`oci://`: an image volume in Kubernetes, a directory of the local cache on this machine."""
    directory = _cached_image(location, cache_directory)
    if not directory.is_dir():
        raise ModelElsewhere(
            f"oci://{location} is not in the local model cache: expected it at {directory}. `make model` writes "
            "oci://localhost/models/smollm2-135m-instruct:1 there; copy the files of other images there, or write "
            "the model as hf://org/name or file:///path/to/model"
        )
    return directory


def _cached_image(location: str, cache_directory: Path) -> Path:
    """`registry/name:tag` → `<cache>/models/registry/name/tag`; without a tag, `latest`."""
    repository, _, name = location.rpartition("/")
    name, _, tag = name.partition(":")
    if not repository or not name or ".." in location.split("/"):
        raise BadInput(f"expected an image as oci://registry/name:tag, found oci://{location}")
    return cache_directory / "models" / repository / name / (tag or "latest")


def _resolve_file(location: str, _cache_directory: Path, _accept: Accept) -> Path:
    """`file://`: a directory on this machine."""
    directory = Path(location)
    # A URI may spell a space as %20, and a directory may have %20 in its name.
    if not directory.is_dir() and (decoded := Path(unquote(location))).is_dir():
        directory = decoded
    if not directory.is_absolute():
        raise BadInput(f"expected an absolute path, file:///path/to/model, found file://{location}")
    if not directory.is_dir():
        raise BadInput(f"expected a model directory at {directory}, found {'a file' if directory.exists() else 'none'}")
    return directory


def _refuse_volume_claim(location: str, _cache_directory: Path, _accept: Accept) -> NoReturn:
    """`pvc://`: a directory on a volume that Kubernetes mounts."""
    raise ModelElsewhere(
        f"pvc://{location} exists only in a Kubernetes cluster; on this machine, copy the model to a directory "
        "and write file:///path/to/model"
    )


_RESOLVE: dict[str, Callable[[str, Path, Accept], Path]] = {
    "file": _resolve_file,
    "hf": hub.resolve,
    "oci": _resolve_image,
    "pvc": _refuse_volume_claim,
    "random": random_model.resolve,
}
