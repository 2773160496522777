"""Images in buildah's storage. Each layer is a folder of files that never change."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_cluster.commands import run
from rljob_cluster.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer in buildah's storage."""

    storage: Path
    """Folder of all layers."""
    id: str
    """Id in buildah's storage."""
    chain_id: str
    """Digest of the chain of layers up to this one, as defined by the OCI image specification."""

    @property
    def folder(self) -> Path:
        return self.storage / self.id / "diff"


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image in buildah's storage."""

    name: str
    config: bytes
    """JSON, unchanged."""
    manifest: bytes
    """JSON, unchanged."""
    layers: tuple[Layer, ...]
    """Lowest first."""

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.manifest).hexdigest()}"


def find_image(name: str) -> BuiltImage:
    """The image with this name. Raises ClusterError if buildah does not have it, or does not use overlay storage."""
    found = json.loads(run("buildah", "inspect", "--type", "image", name))
    storage = json.loads(run("buildah", "info"))["store"]
    if storage["GraphDriverName"] != "overlay":
        raise ClusterError(
            f"expected buildah's storage on overlay, found {storage['GraphDriverName']}: set STORAGE_DRIVER=overlay "
            f"and build {name} again, or save it to an archive and load that"
        )
    root = Path(storage["GraphRoot"])
    images = json.loads((root / "overlay-images" / "images.json").read_text())
    layers = json.loads((root / "overlay-layers" / "layers.json").read_text())
    top = next(image["layer"] for image in images if image["id"] == found["FromImageID"])
    stack = layer_stack(top, layers)
    if (diff_ids := json.loads(found["Config"])["rootfs"]["diff_ids"]) != [layer["diff-digest"] for layer in stack]:
        raise ClusterError(f"the layers of {name} in buildah's storage do not match its config: build the image again")
    chain = zip(stack, chain_ids(diff_ids), strict=True)
    named = tuple(Layer(root / "overlay", layer["id"], chain_id) for layer, chain_id in chain)
    return BuiltImage(name, found["Config"].encode(), found["Manifest"].encode(), named)


def layer_stack(top: str, layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The layer with the id `top` and the layers below it, lowest first."""
    by_id = {layer["id"]: layer for layer in layers}
    stack = [by_id[top]]
    while parent := stack[0].get("parent"):
        stack.insert(0, by_id[parent])
    return stack


def chain_ids(diff_ids: list[str]) -> list[str]:
    """Chain ids of the layers, as defined by the OCI image specification."""
    chain: list[str] = []
    for diff_id in diff_ids:
        chain.append(f"sha256:{hashlib.sha256(f'{chain[-1]} {diff_id}'.encode()).hexdigest()}" if chain else diff_id)
    return chain
