"""Images, certificates and control groups of the test cluster, and its wait for CRDs."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from rljob_cluster import api_client, cgroups
from rljob_cluster.api_client import StartupClient
from rljob_cluster.certificates import Authority
from rljob_cluster.commands import ClusterError
from rljob_cluster.image_files import SmallImage, chain_ids, layer_stack, write_archive, write_metadata_archive
from rljob_cluster.images import images_of

IMAGE = SmallImage("localhost/test:1", {"bin/tool": b"program"}, {"bin/alias": "tool"}, ("/bin/tool",))


def test_an_archive_is_reproducible_and_its_blobs_have_their_digests(tmp_path: Path) -> None:
    one, two = tmp_path / "one.tar", tmp_path / "two.tar"
    write_archive(IMAGE, one)
    write_archive(IMAGE, two)
    assert one.read_bytes() == two.read_bytes()
    with tarfile.open(one) as archive:
        blobs = {name: archive.extractfile(name) for name in archive.getnames() if name.startswith("blobs/sha256/")}
        contents = {name: file.read() for name, file in blobs.items() if file}
    assert all(name == f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}" for name, blob in contents.items())
    manifest = json.loads(next(blob for blob in contents.values() if b'"layers"' in blob))
    layer = contents["blobs/sha256/" + manifest["layers"][0]["digest"].removeprefix("sha256:")]
    with tarfile.open(fileobj=io.BytesIO(layer)) as content:
        assert content.getnames() == ["bin", "bin/tool", "bin/alias"]
        assert content.getmember("bin/tool").mode == 0o755


def test_the_images_of_an_archive_are_read_from_its_index(tmp_path: Path) -> None:
    manifest = b'{"schemaVersion": 2}'
    write_metadata_archive("localhost/test:1", b"{}", manifest, tmp_path / "image.tar")
    assert images_of(tmp_path / "image.tar") == {"localhost/test:1": f"sha256:{hashlib.sha256(manifest).hexdigest()}"}
    with tarfile.open(tmp_path / "docker.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("manifest.json"))
    assert images_of(tmp_path / "docker.tar") == {}
    (tmp_path / "notes.txt").write_text("not an image")
    with pytest.raises(ClusterError, match=r"Docker archive in .*notes\.txt"):
        images_of(tmp_path / "notes.txt")


def test_layers_of_built_images_are_chained_from_the_lowest_to_the_top() -> None:
    layers = [{"id": "top", "parent": "middle"}, {"id": "other"}, {"id": "base"}, {"id": "middle", "parent": "base"}]
    assert [layer["id"] for layer in layer_stack("top", layers)] == ["base", "middle", "top"]
    second = f"sha256:{hashlib.sha256(b'sha256:a sha256:b').hexdigest()}"
    third = f"sha256:{hashlib.sha256(f'{second} sha256:c'.encode()).hexdigest()}"
    assert chain_ids(["sha256:a", "sha256:b", "sha256:c"]) == ["sha256:a", second, third]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path / "certificates")
    made.ensure()
    return made


def test_a_kubeconfig_is_private_and_names_a_signed_user(authority: Authority, tmp_path: Path) -> None:
    path = authority.kubeconfig(tmp_path / "kubeconfig", "https://10.0.0.1:6443", "someone", "admins")
    for secret in (path, authority.pair.key, authority.service_account_key()):
        assert secret.stat().st_mode & 0o077 == 0
    document = yaml.safe_load(path.read_text())
    cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    signer, certificate = (
        x509.load_pem_x509_certificate(base64.b64decode(data))
        for data in (cluster["certificate-authority-data"], user["client-certificate-data"])
    )
    certificate.verify_directly_issued_by(signer)
    assert {attribute.value for attribute in certificate.subject} == {"someone", "admins"}
    before = authority.pair.certificate.read_bytes()
    authority.ensure()
    assert authority.pair.certificate.read_bytes() == before


def test_processes_are_those_of_the_group_and_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In version 1 of the kernel's interface; a link to a hierarchy is none."""
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path)
    for name in ("cpuset", "memory"):
        (tmp_path / name).mkdir()
    (tmp_path / "cpu").symlink_to("memory")
    (tmp_path / "cpuset" / "cpuset.cpus").write_text("0-3")
    (tmp_path / "cpuset" / "cpuset.mems").write_text("0")
    cgroups.create()
    assert (tmp_path / "cpuset" / "rljob-cluster" / "gpu-node" / "cpuset.cpus").read_text() == "0-3"
    node = tmp_path / "memory" / "rljob-cluster" / "gpu-node"
    (node / "pod").mkdir()
    (node / "pod" / "cgroup.procs").write_text("11\n12\n")
    (node / "cgroup.procs").write_text("10\n")
    (tmp_path / "memory" / "cgroup.procs").write_text("1\n")
    assert cgroups.processes("rljob-cluster") == {10, 11, 12}
    assert cgroups.processes("rljob-cluster/cpu-node") == set()
    assert [path.name for path in cgroups.hierarchies(tmp_path)] == ["cpuset", "memory"]


NAMES_ACCEPTED = {"type": "NamesAccepted", "status": "True"}
DONE = {"conditions": [NAMES_ACCEPTED, {"type": "Established", "status": "True"}]}
NOT_YET: list[dict[str, Any] | None] = [
    None,
    {},
    {"conditions": None, "storedVersions": ["v1"]},
    {"conditions": [NAMES_ACCEPTED, {"type": "Established", "status": "False"}]},
]
"""Fields of `status`. The API server returns the third one from the creation itself."""


def crds(*statuses: object) -> bytes:
    items = [{"metadata": {"name": f"crd-{number}"}, "status": status} for number, status in enumerate(statuses)]
    return json.dumps({"items": items}).encode()


def test_the_wait_for_crds_ends_when_all_are_established(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "POLL_SECONDS", 0.0)
    client = StartupClient("https://127.0.0.1:1", authority.pair, authority.client("someone", "someone"))
    assert client.get("/readyz") is None, "nothing listens there"
    answers: list[Any] = [None, crds(), *(crds(DONE, status) for status in NOT_YET), crds(DONE, DONE), crds()]
    monkeypatch.setattr(StartupClient, "get", lambda client, path: answers.pop(0))
    client.wait_established()
    assert answers == [crds()], "the last one is not asked for"
    for answer, found in [
        (None, "no answer from the API server"),
        (crds(), "found none"),
        (crds(DONE, *NOT_YET[2:4]), "these without the condition: crd-1, crd-2"),
    ]:
        monkeypatch.setattr(StartupClient, "get", lambda client, path, answer=answer: answer)
        with pytest.raises(ClusterError, match=found):
            client.wait_established(seconds=0.01)
