"""Errors about missing requirements of a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rljob_cluster import cluster, requirements
from rljob_cluster.api_client import ApiClient
from rljob_cluster.binaries import SOURCES
from rljob_cluster.certificates import Authority
from rljob_cluster.commands import run
from rljob_cluster.control_plane import ControlPlane
from rljob_cluster.errors import ClusterError
from rljob_cluster.fake_nodes import fake_node
from rljob_cluster.layout import ClusterLayout
from rljob_cluster.requirements import PROGRAMS, missing_packages, require_packages


def test_without_root_the_error_names_the_commands_that_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"needs root; this process has user id 1000.*`build` and `control-plane`"):
        cluster.require_up(ClusterLayout(tmp_path, tmp_path))


def test_missing_programs_are_named_by_the_packages_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "SEARCH_PATH", "/nowhere")
    monkeypatch.setattr(requirements, "CNI_PLUGINS", ())
    assert set(missing_packages()) == {*PROGRAMS.values(), "containernetworking-plugins"}
    with pytest.raises(ClusterError, match=r"apt-get install containernetworking-plugins iproute2"):
        require_packages()


def test_the_list_of_packages_has_every_package_that_is_asked_for() -> None:
    listed = (SOURCES.parent / "packages.txt").read_text().split()
    assert {*PROGRAMS.values(), "containernetworking-plugins"} <= set(listed)
    assert listed == sorted(listed)


def test_missing_control_plane_programs_are_refused_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="rljob_cluster build"):
        ControlPlane(tmp_path, base_port=1, binaries=tmp_path / "none").start()


def test_too_long_a_socket_path_is_refused(tmp_path: Path) -> None:
    for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"):
        (tmp_path / name).touch()
    with pytest.raises(ClusterError, match="expected a path of at most 107 characters"):
        ControlPlane(tmp_path / ("deep" * 30), base_port=1, binaries=tmp_path).start()


def test_a_failed_command_is_reported_with_its_last_lines() -> None:
    with pytest.raises(ClusterError, match=r"`sh -c .*code 4: 6\n7\n8\n9\n10$"):
        run("sh", "-c", "seq 10 >&2; exit 4")


def test_requests_to_an_unreachable_server_return_none(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.ensure()
    client = ApiClient("https://127.0.0.1:1", authority.pair, authority.client("someone", "someone"))
    assert client.get("/readyz") is None


def test_every_second_fake_node_has_gpus_and_all_are_tainted() -> None:
    nodes = [fake_node(position) for position in range(4)]
    assert [node["status"]["allocatable"].get("nvidia.com/gpu") for node in nodes] == [None, "8", None, "8"]
    assert all(node["spec"]["taints"][0]["effect"] == "NoSchedule" for node in nodes)
