"""Images of one node, in its containerd."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_cluster.built_images import Layer
from rljob_cluster.commands import run
from rljob_cluster.errors import ClusterError

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
