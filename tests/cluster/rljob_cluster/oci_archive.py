"""OCI archives of small images, written without an image builder."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
