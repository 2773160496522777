"""Resolves model URIs to local directories in Hugging Face format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

from rljob_client.errors import BadInput
from rljob_trainer.models import hub, random_model
from rljob_trainer.models.checkpoint import validate_checkpoint


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
    try:
        directory = _directory(uri, cache_directory or default_cache_directory(), mounted, accept)
        validate_checkpoint(directory)
    except OSError as error:  # of a parent that this user may not enter, or of a name that is too long
        raise BadInput(
            f"expected a model that this user can read at {uri}, found: {error.strerror or error}; correct the URI, or "
            "the permissions of the directory and its parents"
        ) from error
    return directory


def _directory(uri: str, cache_directory: Path, mounted: Path | None, accept: Accept) -> Path:
    """The directory of the model, whose files may be damaged."""
    scheme, separator, location = uri.partition("://")
    match scheme if separator else None:
        case "oci" | "pvc" if mounted is not None:
            return mounted
        case "file":
            return _local_directory(location)
        case "hf":
            return hub.resolve(location, accept)
        case "oci":
            return _cached_image(location, cache_directory)
        case "pvc":
            raise ModelElsewhere(
                f"pvc://{location} exists only in a Kubernetes cluster; on this machine, copy the model to a directory "
                "and write file:///path/to/model"
            )
        case "random":
            return random_model.resolve(location, cache_directory, accept)
    raise BadInput(f"expected a model URI that begins with file://, hf://, oci://, pvc://, random://, found {uri!r}")


def default_cache_directory() -> Path:
    """`$XDG_CACHE_HOME/rljob`, else `~/.cache/rljob`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob"


def _cached_image(location: str, cache_directory: Path) -> Path:
    """`registry/name:tag` → `<cache>/models/registry/name/tag`; without a tag, `latest`. Pods mount images."""
    repository, _, name = location.rpartition("/")
    name, _, tag = name.partition(":")
    if not repository or not name or ".." in location.split("/"):
        raise BadInput(f"expected an image as oci://registry/name:tag, found oci://{location}")
    directory = cache_directory / "models" / repository / name / (tag or "latest")
    if not directory.is_dir():
        raise ModelElsewhere(
            f"oci://{location} is not in the local model cache: expected it at {directory}. `make model` writes "
            "oci://localhost/models/smollm2-135m-instruct:1 there; copy the files of other images there, or write "
            "the model as hf://org/name or file:///path/to/model"
        )
    return directory


def _local_directory(location: str) -> Path:
    directory = Path(location)
    # A URI may spell a space as %20, and a directory may have %20 in its name.
    if not directory.is_dir() and (decoded := Path(unquote(location))).is_dir():
        directory = decoded
    if not directory.is_absolute():
        raise BadInput(f"expected an absolute path, file:///path/to/model, found file://{location}")
    if not directory.is_dir():
        raise BadInput(f"expected a model directory at {directory}, found {'a file' if directory.exists() else 'none'}")
    return directory
