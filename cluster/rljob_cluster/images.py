"""Puts images onto the nodes. There is no registry: what a pod runs must be there before."""

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
    """Put an image onto every node that lacks it: a file is an archive, anything else the name of buildah's image.

    Raises ClusterError where there is no such image, or a node refuses it.
    """
    if Path(image).is_file():
        load_archive(layout, Path(image))
    else:
        load_built(layout, find_image(image))


def load_archive(layout: ClusterLayout, archive: Path) -> None:
    """Import an OCI archive, or what `docker save` wrote, into every node that lacks an image of it."""
    on_nodes_without(layout, images_of(archive), lambda node: node.import_archive(archive))


def load_built(layout: ClusterLayout, image: BuiltImage) -> None:
    """Give an image of buildah's to every node that lacks it. Its layers are linked: no copy, no archive, seconds."""

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
    """The image of which every pod's sandbox is made."""
    path = layout.state / "pause.tar"
    pause = (layout.binaries / "pause").read_bytes()
    write_archive(SmallImage(PAUSE_IMAGE, {"pause": pause}, {}, ("/pause",)), path)
    return path


def images_of(archive: Path) -> dict[str, str]:
    """The images in an archive by name, each with the digest of its manifest; none for Docker archives before 25.

    Raises ClusterError where the file is no archive.
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
    """Load on all nodes at once, but not where every wanted image is there; where none is known, on all."""
    nodes = [node_images(layout, node) for node in NODES]
    lacking = [node for node in nodes if not wanted or not wanted.items() <= node.digests().items()]
    with ThreadPoolExecutor() as threads:
        list(threads.map(load, lacking))
