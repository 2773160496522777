"""A real Ray whose raylet dies while it starts."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from rljob_memory.budget.host import object_store_bytes
from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_trainer.pods.ray_node import begin, head_command, require_started
from rljob_trainer.roles.ray_driver import start_local_ray

_HOLD = """
import os, sys, time

if any(word.endswith({programs!r}) for word in sys.orig_argv):
    parent = os.getppid()
    while os.getppid() == parent and not os.path.exists({until!r}):
        time.sleep(0.01)
"""


def path_that_holds(programs: tuple[str, ...], directory: Path, until: Path) -> str:
    """PYTHONPATH of processes in which Python begins no program of one of these file names before the file `until`
    exists. A program whose parent has ended is not held.

    `directory`: for the module that Python imports at its start.
    """
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(_HOLD.format(programs=programs, until=str(until)))
    return os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))


FREE_PORT = 26000
"""Far from the ports of `pod_processes.py`."""
AGENTS = ("dashboard/agent.py", "runtime_env/agent/main.py")


@pytest.fixture
def let_agents_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Until it is called, no agent of Ray starts: no raylet is up before it can be killed."""
    until = tmp_path / "agents-may-start"
    monkeypatch.setenv("PYTHONPATH", path_that_holds(AGENTS, tmp_path / "held", until))
    return until.touch


def test_ray_is_started_again_and_nothing_of_the_first_start_is_left(let_agents_start: Callable[[], None]) -> None:
    before = set(psutil.Process().children())

    def mine() -> set[psutil.Process]:
        return set(psutil.Process().children()) - before

    with ThreadPoolExecutor() as threads:
        killed = threads.submit(kill_the_first_raylet, mine, let_agents_start)
        try:
            start_local_ray(cpus=1, gpus=0, object_store_bytes=object_store_bytes(1 << 20, "cpu"))
            assert ray.is_initialized()
            assert killed.result() not in psutil.pids()
            assert sorted(child.name() for child in mine()) == ["gcs_server", "raylet"]
        finally:
            ray.shutdown()


@pytest.mark.long
def test_the_ray_of_a_pod_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, let_agents_start: Callable[[], None]
) -> None:
    directory = tempfile.mkdtemp(prefix="pod-")  # its path must be short, for Ray's sockets
    monkeypatch.setattr(tempfile, "tempdir", directory)

    def mine() -> set[psutil.Process]:
        names = ("gcs_server", "raylet")
        return {each for each in psutil.process_iter(["name", "cmdline"]) if is_of(each, names, directory)}

    log = tmp_path / "ray-start.log"
    start = begin(head_command(pod_ip="127.0.0.1", port=FREE_PORT, first_port=FREE_PORT + 10), log)
    try:
        killed = kill_the_first_raylet(mine, let_agents_start)
        require_started(start.wait(PATIENCE_SECONDS), log)
        assert killed not in psutil.pids()
        assert sorted(each.name() for each in mine()) == ["gcs_server", "raylet"]
        assert "start 1 of 3 failed: raylet with exit code -9" in log.read_text()
    finally:
        start.kill()
        for process in mine():
            process.kill()
        shutil.rmtree(directory, ignore_errors=True)


def is_of(process: psutil.Process, names: tuple[str, ...], directory: str) -> bool:
    if process.info["name"] not in names or directory not in " ".join(process.info["cmdline"] or ()):
        return False
    try:
        parent = process.parent()
        # A child that has not executed its own program yet looks the same.
        return parent is None or parent.name() not in names
    except psutil.NoSuchProcess:
        return False


def kill_the_first_raylet(processes: Callable[[], set[psutil.Process]], let_agents_start: Callable[[], None]) -> int:
    """Kill it once it has executed its program, while its agents are held; returns its process ID."""
    deadline = Deadline(PATIENCE_SECONDS)
    while not deadline.passed:
        for process in processes():
            with suppress(psutil.NoSuchProcess):
                if process.name() == "raylet":
                    process.send_signal(signal.SIGKILL)
                    let_agents_start()
                    return process.pid
        time.sleep(0.01)
    raise AssertionError("no raylet was started")
