"""Programs of the test cluster: built completely or not at all, and ended with their parent."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rljob_cluster import cluster
from rljob_cluster.binaries import MODULES, SOURCES, Module, build, require_binaries, versions_key
from rljob_cluster.cluster import PROGRAMS, require_packages
from rljob_cluster.commands import ClusterError, ProgressLines
from rljob_cluster.control_plane import ChildProcess, ControlPlane
from rljob_cluster.layout import ClusterLayout
from rljob_testing.patience import PATIENCE_SECONDS, Deadline

FILES = st.dictionaries(st.text("abc/.", min_size=1), st.binary(max_size=8), max_size=4)


@given(FILES, FILES)
def test_the_key_of_built_programs_differs_exactly_if_their_sources_do(
    some: dict[str, bytes], others: dict[str, bytes]
) -> None:
    assert (versions_key(some) == versions_key(others)) == (some == others)
    assert versions_key(dict(reversed(some.items()))) == versions_key(some)


def test_programs_are_built_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module("etcd", {"one": "example.com/one", "two": "example.com/two"})
    go, printed = tmp_path / "path" / "go", io.StringIO()
    go.parent.mkdir()

    def build_with(script: str) -> set[str]:
        go.write_text(f"#!/bin/sh\nfor word; do last=$output; output=$previous; previous=$word; done\n{script}\n")
        go.chmod(0o755)
        build([module], tmp_path / "bin", ProgressLines(Console(file=printed)))
        return {path.name for path in (tmp_path / "bin").iterdir()}

    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(go.parent), prepend=":")
        with pytest.raises(ClusterError, match="undefined: x"):
            build_with('echo half > "$output"; echo "undefined: x" >&2; exit 1')
        assert list((tmp_path / "bin").iterdir()) == []
        assert build_with('echo built > "$output"') == {"one", "two"}
        assert "building one, 1 of 2" in printed.getvalue()
        assert build_with("exit 1") == {"one", "two"}, "they exist"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"Go toolchain, 1\.26 or newer"):
        build(MODULES, tmp_path / "empty", ProgressLines(Console(file=printed)))


def test_what_is_missing_is_named_with_the_command_that_provides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etcd").touch()
    with pytest.raises(ClusterError, match=r"missing: kubectl.*build"):
        require_binaries(tmp_path, ["etcd", "kubectl"])
    with pytest.raises(ClusterError, match="rljob_cluster build"):
        ControlPlane(tmp_path, base_port=1, binaries=tmp_path / "none").start()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"needs root; this process has user id 1000.*`build` and `control-plane`"):
        cluster.require_up(ClusterLayout(tmp_path, tmp_path))
    monkeypatch.setattr(cluster, "SEARCH_PATH", "/nowhere")
    monkeypatch.setattr(cluster, "CNI_PLUGINS", ())
    with pytest.raises(ClusterError, match=r"apt-get install containernetworking-plugins iproute2"):
        require_packages()
    listed = (SOURCES.parent / "packages.txt").read_text().split()
    assert {*PROGRAMS.values(), "containernetworking-plugins"} <= set(listed)


def until(holds: Callable[[], bool]) -> None:
    deadline = Deadline(PATIENCE_SECONDS)
    while not holds():
        assert not deadline.passed
        time.sleep(0.02)


def test_an_exited_child_is_reported_with_its_last_output(tmp_path: Path) -> None:
    child = ChildProcess(["/bin/sh", "-c", "echo no such key >&2; exit 3"], tmp_path / "log")
    child.start()

    def reported() -> bool:
        try:
            child.check_running()
        except ClusterError as error:
            return "code 3" in str(error) and "no such key" in str(error)
        return False

    until(reported)


def test_a_child_exits_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = f"""
import os, signal
from pathlib import Path
from rljob_cluster.control_plane import ChildProcess
said = Path("{tmp_path}/pid")
script = f"echo $$ > {{said}}.partial; mv {{said}}.partial {{said}}; exec sleep 60"
child = ChildProcess(["/bin/sh", "-c", script], Path("{tmp_path}/log"))
child.start()
while not said.exists():
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", parent], check=False)
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
