"""The cluster's control groups under both versions of the kernel's interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_cluster import cgroups


def test_version_2_has_one_hierarchy(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "system.slice").mkdir()
    assert cgroups.hierarchies(tmp_path) == [tmp_path]


def test_version_1_has_one_for_each_controller_and_links_do_not_count(tmp_path: Path) -> None:
    for name in ("cpu,cpuacct", "memory"):
        (tmp_path / name).mkdir()
    (tmp_path / "cpu").symlink_to("cpu,cpuacct")
    assert [path.name for path in cgroups.hierarchies(tmp_path)] == ["cpu,cpuacct", "memory"]


def test_a_new_group_has_the_processors_of_its_parent_in_version_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path)
    (tmp_path / "cpuset").mkdir()
    (tmp_path / "cpuset" / "cpuset.cpus").write_text("0-3")
    (tmp_path / "cpuset" / "cpuset.mems").write_text("0")
    cgroups.create()
    assert (tmp_path / "cpuset" / "rljob-cluster" / "gpu-node" / "cpuset.cpus").read_text() == "0-3"


def test_processes_are_those_of_the_group_and_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path)
    pod = tmp_path / "memory" / "rljob-cluster" / "gpu-node" / "pod"
    pod.mkdir(parents=True)
    (pod / "cgroup.procs").write_text("11\n12\n")
    (pod.parent / "cgroup.procs").write_text("10\n")
    (tmp_path / "memory" / "cgroup.procs").write_text("1\n")
    assert cgroups.processes("rljob-cluster") == {10, 11, 12}
    assert cgroups.processes("rljob-cluster/cpu-node") == set()


def test_removing_missing_groups_succeeds_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path)
    (tmp_path / "memory").mkdir()
    cgroups.remove()
