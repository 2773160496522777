"""Images outside the nodes: in buildah's storage, and as OCI archives."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_cluster.commands import ClusterError, run

# Images in buildah's storage. Each layer is a folder of files that never change.


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


# OCI archives of small images, written without an image builder.

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True, slots=True)
class SmallImage:
    """An image with one layer."""

    name: str
    files: dict[str, bytes]
    """Content by path, without a leading slash."""
    links: dict[str, str]
    """Target of each symbolic link by path, without a leading slash."""
    command: tuple[str, ...]
    """Entry point."""


def write_archive(image: SmallImage, path: Path) -> None:
    """Write the image as an OCI archive. The same image always produces the same bytes."""
    layer = _tar(image.files, image.links)
    config = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": list(image.command), "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
        }
    )
    _write(image.name, manifest, [layer, config], path)


def write_metadata_archive(name: str, config: bytes, manifest: bytes, path: Path) -> None:
    """Write an OCI archive of an image without its layers, for a node that has the layers."""
    _write(name, manifest, [config], path)


def _write(name: str, manifest: bytes, blobs: list[bytes], path: Path) -> None:
    entry = _descriptor(json.loads(manifest).get("mediaType", MANIFEST_TYPE), manifest)
    entry["annotations"] = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    files = {f"blobs/sha256/{_digest(blob).removeprefix('sha256:')}": blob for blob in (*blobs, manifest)}
    index = _json({"schemaVersion": 2, "manifests": [entry]})
    path.write_bytes(_tar({"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": index} | files, {}))


def _tar(files: dict[str, bytes], links: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in sorted({str(parent) for file in (*files, *links) for parent in Path(file).parents} - {"."}):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
        for name, target in sorted(links.items()):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return buffer.getvalue()


def _descriptor(kind: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _json(document: object) -> bytes:
    return json.dumps(document, sort_keys=True).encode()
