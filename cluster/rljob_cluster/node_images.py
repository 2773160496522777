"""The images of one node, as its containerd holds them."""

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
    """Every method raises ClusterError where containerd refuses."""

    ctr: Path
    containerd_socket: Path

    def digests(self) -> dict[str, str]:
        """The digest of each image's manifest, by the image's name."""
        lines = self._run("images", "list").splitlines()[1:]
        return {name: digest for name, _, digest, *_ in (line.split() for line in lines)}

    def import_archive(self, archive: Path) -> None:
        """Import and unpack; remove what the images of the archive replace."""
        self._run("images", "import", "--local", "--discard-unpacked-layers", str(archive))
        found = self.digests()
        named = {digest for name, digest in found.items() if not name.startswith("sha256:")}
        for name, digest in found.items():
            if digest not in named:
                self._run("images", "remove", name)

    def has_layer(self, layer: Layer) -> bool:
        return self._has_snapshot(layer.chain_id)

    def link_layer(self, layer: Layer, below: Layer | None) -> None:
        """Make a layer of hard links to its files, on top of `below`; a copy where they are on another file system.

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
        """From here on the layer stays as long as an image needs it."""
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
    """Where a snapshot's own files lie: the source of the lowest layer's mount, the upper folder of another's."""
    uppers = [option.removeprefix("upperdir=") for option in mount["Options"] if option.startswith("upperdir=")]
    return Path(uppers[0] if uppers else mount["Source"])
