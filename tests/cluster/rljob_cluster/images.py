"""Loads images onto the nodes. There is no registry: the image of a pod must be loaded before the pod is created."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from rljob_cluster.built_images import BuiltImage, find_image
from rljob_cluster.errors import ClusterError
from rljob_cluster.layout import NODES, ClusterLayout, Node
from rljob_cluster.node_config import PAUSE_IMAGE
from rljob_cluster.node_images import NodeImages
from rljob_cluster.oci_archive import SmallImage, write_archive, write_metadata_archive


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
