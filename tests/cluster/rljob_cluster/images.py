"""Loads images onto the nodes. There is no registry: the image of a pod must be loaded before the pod is created."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rljob_cluster.commands import ClusterError, run
from rljob_cluster.image_files import BuiltImage, Layer, SmallImage, find_image, write_archive, write_metadata_archive
from rljob_cluster.layout import NODES, ClusterLayout, Node
from rljob_cluster.node_programs import PAUSE_IMAGE


def load(layout: ClusterLayout, image: str) -> None:
    """Load an image onto all nodes that do not have it. `image` is an archive file or the name of an image in buildah.

    Raises ClusterError if the image does not exist or a node rejects it.
    """
    if Path(image).is_file():
        load_archive(layout, Path(image))
    else:
        load_built(layout, find_image(image))


def load_archive(layout: ClusterLayout, archive: Path) -> None:
    """Import an OCI archive, or one written by `docker save`, into all nodes that lack one of its images."""
    on_nodes_without(layout, images_of(archive), lambda node: node.import_archive(archive))


def load_built(layout: ClusterLayout, image: BuiltImage) -> None:
    """Load an image of buildah onto all nodes that do not have it, within seconds: its layers are hard-linked."""

    def load_onto(node: NodeImages) -> None:
        for below, layer in zip((None, *image.layers), image.layers, strict=False):
            if not node.has_layer(layer):
                node.link_layer(layer, below)
        with TemporaryDirectory(dir=layout.state) as folder:
            archive = Path(folder) / "image.tar"
            write_metadata_archive(image.name, image.config, image.manifest, archive)
            node.import_archive(archive)
        for layer in image.layers:
            node.release(layer)

    on_nodes_without(layout, {image.name: image.digest}, load_onto)


def write_pause_archive(layout: ClusterLayout) -> Path:
    """Write the archive of the image for the sandboxes of pods."""
    path = layout.state / "pause.tar"
    pause = (layout.binaries / "pause").read_bytes()
    write_archive(SmallImage(PAUSE_IMAGE, {"pause": pause}, {}, ("/pause",)), path)
    return path


def images_of(archive: Path) -> dict[str, str]:
    """Digest of the manifest of each image in an archive, by image name. Empty for archives of Docker before 25.

    Raises ClusterError if the file is not an archive.
    """
    try:
        with tarfile.open(archive) as content:
            if "index.json" not in content.getnames():
                return {}
            member = content.extractfile("index.json")
            index = json.load(member) if member else {}
    except (tarfile.TarError, json.JSONDecodeError, OSError) as error:
        raise ClusterError(f"expected an OCI or Docker archive in {archive}: {error}") from error
    entries = ((entry.get("annotations", {}), entry["digest"]) for entry in index.get("manifests", ()))
    return {
        notes["io.containerd.image.name"]: digest for notes, digest in entries if "io.containerd.image.name" in notes
    }


def node_images(layout: ClusterLayout, node: Node) -> NodeImages:
    return NodeImages(layout.binaries / "ctr", layout.node(node).containerd_socket)


def on_nodes_without(layout: ClusterLayout, wanted: dict[str, str], load: Callable[[NodeImages], None]) -> None:
    """Call `load` concurrently for the nodes that lack a wanted image, or for all nodes if `wanted` is empty."""
    nodes = [node_images(layout, node) for node in NODES]
    lacking = [node for node in nodes if not wanted or not wanted.items() <= node.digests().items()]
    with ThreadPoolExecutor() as threads:
        list(threads.map(load, lacking))


# Images of one node, in its containerd.

KEEP_LABEL = "containerd.io/gc.root"
# Files cannot be linked out of a mount, and buildah mounts the folder of its layers onto itself: look below that.
LINK = """
if mountpoint -q "$0"; then umount --lazy "$0"; fi
cp --archive --link --no-target-directory "$1" "$2"
"""


@dataclass(frozen=True, slots=True)
class NodeImages:
    """Image store of a node. Its methods raise ClusterError if containerd refuses a request."""

    ctr: Path
    containerd_socket: Path

    def digests(self) -> dict[str, str]:
        """Digest of each image's manifest, by image name."""
        lines = self._run("images", "list").splitlines()[1:]
        return {name: digest for name, _, digest, *_ in (line.split() for line in lines)}

    def import_archive(self, archive: Path) -> None:
        """Import and unpack the archive, and remove images that it replaces."""
        self._run("images", "import", "--local", "--discard-unpacked-layers", str(archive))
        found = self.digests()
        named = {digest for name, digest in found.items() if not name.startswith("sha256:")}
        for name, digest in found.items():
            if digest not in named:
                self._run("images", "remove", name)

    def has_layer(self, layer: Layer) -> bool:
        return self._has_snapshot(layer.chain_id)

    def link_layer(self, layer: Layer, below: Layer | None) -> None:
        """Create a layer on top of `below` from hard links to its files, or from copies on another file system.

        It stays until `release`, whether an image needs it or not.
        """
        key = f"linking-{layer.chain_id}"
        if self._has_snapshot(key):
            self._run("snapshots", "remove", key)
        parent = [below.chain_id] if below else []
        mounts = json.loads(self._run("snapshots", "prepare", "--mounts", key, *parent))
        folder = writable_folder(mounts[0])
        if folder.stat().st_dev == layer.folder.stat().st_dev:
            run("unshare", "--mount", "--propagation=private", "sh", "-euc", LINK, layer.storage, layer.folder, folder)
        else:
            run("cp", "--archive", "--no-target-directory", layer.folder, folder)
        self._run("snapshots", "commit", layer.chain_id, key)

    def release(self, layer: Layer) -> None:
        """Tie the lifetime of the layer to the images that need it."""
        self._run("snapshots", "label", layer.chain_id, f"{KEEP_LABEL}=")

    def _has_snapshot(self, name: str) -> bool:
        try:
            self._run("snapshots", "info", name)
        except ClusterError as error:
            if "not found" in str(error):
                return False
            raise
        return True

    def _run(self, *words: str) -> str:
        return run(self.ctr, "--address", self.containerd_socket, "--namespace", "k8s.io", *words)


def writable_folder(mount: dict[str, Any]) -> Path:
    """Folder of a snapshot's own files: the mount source of the lowest layer, or the upper folder of another layer."""
    uppers = [option.removeprefix("upperdir=") for option in mount["Options"] if option.startswith("upperdir=")]
    return Path(uppers[0] if uppers else mount["Source"])
