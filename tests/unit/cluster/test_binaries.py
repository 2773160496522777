"""Programs of a cluster and their folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_cluster.binaries import (
    CONTROL_PLANE,
    KUBERNETES_VERSION,
    KWOK,
    MODULES,
    SOURCES,
    binary_directory,
    only,
    require_binaries,
    versions_key,
)
from rljob_cluster.errors import ClusterError

FILES = st.dictionaries(st.text("abc/.", min_size=1), st.binary(max_size=8), max_size=4)


@given(FILES, FILES)
def test_the_key_differs_if_and_only_if_the_files_differ(some: dict[str, bytes], others: dict[str, bytes]) -> None:
    assert (versions_key(some) == versions_key(others)) == (some == others)


@given(FILES)
def test_the_order_of_the_files_does_not_matter(files: dict[str, bytes]) -> None:
    assert versions_key(dict(reversed(files.items()))) == versions_key(files)


def test_the_environment_may_name_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLJOB_CLUSTER_BIN", "/opt/kubernetes")
    assert binary_directory() == Path("/opt/kubernetes")


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLJOB_CLUSTER_BIN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert binary_directory().parent == Path("/caches/rljob/cluster/bin")


def test_missing_programs_are_named(tmp_path: Path) -> None:
    (tmp_path / "etcd").touch()
    with pytest.raises(ClusterError, match=r"missing: kubectl.*build"):
        require_binaries(tmp_path, ["etcd", "kubectl"])


@pytest.mark.parametrize("module", [*MODULES, KWOK], ids=lambda module: module.name)
def test_every_program_is_pinned_by_its_module(module: object) -> None:
    folder = SOURCES / module.name  # type: ignore[attr-defined]
    pins = (folder / "go.mod").read_text()
    assert (folder / "go.sum").stat().st_size > 0
    for package in module.programs.values():  # type: ignore[attr-defined]
        local = package.startswith("./")
        assert (folder / package / "main.go").exists() if local else re.search(rf"\t?{re.escape(package)}\n", pins)


def test_the_version_that_kubernetes_reports_is_the_one_that_is_built() -> None:
    pins = (SOURCES / "kubernetes" / "go.mod").read_text()
    assert f"k8s.io/kubernetes {KUBERNETES_VERSION} " in pins
    staging = set(re.findall(r"=> k8s\.io/\S+ (\S+)", pins))
    assert staging == {KUBERNETES_VERSION.replace("v1.", "v0.")}


def test_the_control_plane_is_built_without_kubelets() -> None:
    modules = only((*CONTROL_PLANE, "helm"))
    assert [name for module in modules for name in sorted(module.programs)] == [
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kubectl",
        "etcd",
        "helm",
    ]
