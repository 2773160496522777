"""Images: archives written and read, and the layers of buildah's storage."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_cluster.built_images import chain_ids, layer_stack
from rljob_cluster.errors import ClusterError
from rljob_cluster.images import images_of
from rljob_cluster.node_images import writable_folder
from rljob_cluster.oci_archive import SmallImage, write_archive, write_metadata_archive

IMAGE = SmallImage("localhost/test:1", {"bin/tool": b"program"}, {"bin/alias": "tool"}, ("/bin/tool",))


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        files = (archive.extractfile(member) for member in archive.getmembers() if member.isfile())
        names = (member.name for member in archive.getmembers() if member.isfile())
        return {name: file.read() for name, file in zip(names, files, strict=True) if file}


def test_every_blob_of_an_archive_has_the_digest_that_names_it(tmp_path: Path) -> None:
    write_archive(IMAGE, tmp_path / "image.tar")
    blobs = {name: blob for name, blob in members(tmp_path / "image.tar").items() if name.startswith("blobs/")}
    assert len(blobs) == 3
    for name, blob in blobs.items():
        assert name == f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}"


def test_the_layer_holds_files_and_links(tmp_path: Path) -> None:
    write_archive(IMAGE, tmp_path / "image.tar")
    blobs = members(tmp_path / "image.tar")
    manifest = json.loads(next(blob for name, blob in blobs.items() if b'"layers"' in blob and "blobs" in name))
    layer = blobs["blobs/sha256/" + manifest["layers"][0]["digest"].removeprefix("sha256:")]
    with tarfile.open(fileobj=io.BytesIO(layer)) as content:
        assert content.getnames() == ["bin", "bin/tool", "bin/alias"]
        assert content.getmember("bin/alias").linkname == "tool"
        assert content.getmember("bin/tool").mode == 0o755


def test_the_same_image_makes_the_same_archive(tmp_path: Path) -> None:
    write_archive(IMAGE, tmp_path / "one.tar")
    write_archive(IMAGE, tmp_path / "two.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def test_the_images_of_an_archive_are_read_from_its_index(tmp_path: Path) -> None:
    manifest = b'{"schemaVersion": 2}'
    write_metadata_archive("localhost/test:1", b"{}", manifest, tmp_path / "image.tar")
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    assert images_of(tmp_path / "image.tar") == {"localhost/test:1": digest}


def test_an_archive_without_an_index_has_no_known_images(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "docker.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("manifest.json"))
    assert images_of(tmp_path / "docker.tar") == {}


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not an image")
    with pytest.raises(ClusterError, match=r"Docker archive in .*notes\.txt"):
        images_of(tmp_path / "notes.txt")


@given(st.lists(st.sampled_from(["sha256:a", "sha256:b", "sha256:c"]), min_size=1))
def test_a_chain_id_covers_a_layer_and_all_layers_below(diff_ids: list[str]) -> None:
    chain = chain_ids(diff_ids)
    assert chain[0] == diff_ids[0]
    assert chain[:-1] == chain_ids(diff_ids[:-1])
    for below, diff_id, found in zip(chain, diff_ids[1:], chain[1:], strict=False):
        assert found == f"sha256:{hashlib.sha256(f'{below} {diff_id}'.encode()).hexdigest()}"


def test_a_stack_goes_from_the_lowest_layer_to_the_top() -> None:
    layers = [{"id": "top", "parent": "middle"}, {"id": "other"}, {"id": "base"}, {"id": "middle", "parent": "base"}]
    assert [layer["id"] for layer in layer_stack("top", layers)] == ["base", "middle", "top"]


def test_a_snapshots_own_files_are_in_its_upper_folder_or_are_its_mount() -> None:
    lowest = {"Type": "bind", "Source": "/snapshots/1/fs", "Options": ["rw", "rbind"]}
    upper = {
        "Type": "overlay",
        "Source": "overlay",
        "Options": ["workdir=/w", "upperdir=/snapshots/2/fs", "lowerdir=/l"],
    }
    assert writable_folder(lowest) == Path("/snapshots/1/fs")
    assert writable_folder(upper) == Path("/snapshots/2/fs")
