"""Names of processes, containers, and ids in the output of programs."""

from __future__ import annotations

import os
import re

import pytest

from rljob_testing.soak.leaks import Container, ids_in
from rljob_testing.soak.processes import RunningProcess, command_line, name_of


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["ray::RoleActor.update"], "ray::RoleActor"),
        (["/opt/venv/lib/python3.11/site-packages/ray/core/src/ray/raylet/raylet", "--port=1"], "raylet"),
        (["/opt/venv/bin/python", "/opt/venv/bin/rljob", "worker"], "rljob worker"),
        (["/opt/venv/bin/python", "-u", "/x/ray/_private/log_monitor.py", "a"], "log_monitor.py"),
        (["/pause"], "pause"),
        ([""], "(ended)"),
        ([], "(ended)"),
    ],
)
def test_a_process_has_a_readable_name(words: list[str], name: str) -> None:
    assert name_of(words) == name


def test_an_ended_process_has_no_command_line_and_is_not_killed() -> None:
    import psutil

    pid = os.posix_spawn("/bin/true", ["true"], {})
    process = RunningProcess("true", psutil.Process(pid))
    os.waitpid(pid, 0)
    assert command_line(pid) == []
    process.kill()


def test_a_container_has_its_pod_and_its_network() -> None:
    namespaces = [{"type": "pid"}, {"type": "network", "path": "/var/run/netns/cni-1"}]
    info = {"ID": "c1", "Labels": {"io.kubernetes.pod.uid": "u1"}, "Spec": {"linux": {"namespaces": namespaces}}}
    assert Container.of(info) == Container("c1", "u1", "cni-1")
    assert Container.of({**info, "Labels": {}}).pod_uid == ""


def test_ids_are_found_with_their_lines() -> None:
    text = "mount a1b2 on /x\nnothing\n/y/c3d4/z"
    assert list(ids_in(text, re.compile("[a-z]\\d[a-z]\\d"))) == [("mount a1b2 on /x", "a1b2"), ("/y/c3d4/z", "c3d4")]
