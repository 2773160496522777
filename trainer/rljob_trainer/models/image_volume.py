"""`oci://registry/name:tag`: in Kubernetes an image volume, on this machine a directory of the local cache."""

from __future__ import annotations

from pathlib import Path

from rljob_trainer.errors import BadInput


def resolve(location: str, cache_directory: Path) -> Path:
    directory = local_directory(location, cache_directory)
    if not directory.is_dir():
        raise BadInput(
            f"oci://{location} is not in the local model cache: expected it at {directory}. `make model` puts "
            "oci://localhost/models/smollm2-135m-instruct:1 there; for another image, put its files there, or name "
            "the model as hf://org/name or file:///path/to/model"
        )
    return directory


def local_directory(location: str, cache_directory: Path) -> Path:
    """`registry/name:tag` → `<cache>/models/registry/name/tag`; without a tag, `latest`."""
    repository, _, name = location.rpartition("/")
    name, _, tag = name.partition(":")
    if not repository or not name or ".." in location.split("/"):
        raise BadInput(f"expected an image as oci://registry/name:tag, found oci://{location}")
    return cache_directory / "models" / repository / name / (tag or "latest")
