"""Start, supervision and stop of programs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rljob_cluster.child_process import ChildProcess
from rljob_cluster.errors import ClusterError
from rljob_cluster.machine import innermost_pid
from rljob_cluster.status import component_name
from rljob_cluster.supervisor import RESTART_SECONDS
from rljob_testing.patience import PATIENCE_SECONDS, Deadline


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


def test_a_running_child_is_not_started_twice(tmp_path: Path) -> None:
    child = ChildProcess(["/bin/sleep", "60"], tmp_path / "log")
    child.start()
    with pytest.raises(ClusterError, match="already running"):
        child.start()
    child.kill()
    child.start()
    child.stop()


def test_a_child_exits_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = f"""
import os, signal
from pathlib import Path
from rljob_cluster.child_process import ChildProcess
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
    until(lambda: not alive(pid))


def test_the_supervisor_restarts_exited_programs_after_a_delay(tmp_path: Path) -> None:
    # In a process of its own, for it takes note of every child that ends.
    script = f"""
import time
from pathlib import Path
from types import SimpleNamespace
from rljob_cluster import supervisor as module
clock = SimpleNamespace(now=0.0)
module.time = SimpleNamespace(monotonic=lambda: clock.now)
supervisor = module.Supervisor(Path("{tmp_path}"), search_path="/bin")
def starts():
    return len(Path("{tmp_path}/short.log").read_text().splitlines())
for _ in range(2):
    supervisor.ensure("short", ["/bin/sh", "-c", "echo started"])
for number in range(1, 4):
    clock.now = (number - 1) * {RESTART_SECONDS}
    while starts() < number:
        supervisor.restart_ended()
        time.sleep(0.02)
    clock.now += {RESTART_SECONDS} * 0.99
    for _ in range(25):
        supervisor.restart_ended()
        time.sleep(0.02)
    assert starts() == number, f"start {{starts()}} came too soon"
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "short (process" in done.stdout


def test_the_innermost_id_is_the_last_that_the_kernel_lists() -> None:
    assert innermost_pid("Name:\tpython\nNSpid:\t4711\t1\nThreads:\t1") == 1
    assert innermost_pid("NSpid:\t4711\n") == 4711


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/bin/kubelet", "--hostname-override=gpu-node"], "kubelet (gpu-node)"),
        (["/bin/containerd", "--config=/s/nodes/cpu-node/containerd.toml"], "containerd (cpu-node)"),
        (["/bin/etcd", "--data-dir=/s/etcd"], "etcd"),
    ],
)
def test_a_component_is_called_by_its_program_and_node(command: list[str], name: str) -> None:
    assert component_name(command) == name


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
