"""A real Ray whose raylet dies while it starts."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import ray

from rljob_memory.planning.shared_memory import object_store_bytes
from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_trainer.roles.ray_driver import start_local_ray


def test_ray_is_started_again_and_nothing_of_the_first_start_is_left() -> None:
    before = set(psutil.Process().children())
    with ThreadPoolExecutor() as threads:
        killed = threads.submit(kill_the_first_raylet, before)
        try:
            start_local_ray(cpus=1, gpus=0, object_store_bytes=object_store_bytes(1 << 20, "cpu"))
            names = [child.name() for child in set(psutil.Process().children()) - before]
            assert ray.is_initialized()
            assert killed.result() not in psutil.pids()
            assert sorted(names) == ["gcs_server", "raylet"]
        finally:
            ray.shutdown()


def kill_the_first_raylet(before: set[psutil.Process]) -> int:
    """Kill it as soon as it has executed its program, long before its agents are up; returns its process ID."""
    deadline = Deadline(PATIENCE_SECONDS)
    while not deadline.passed:
        for child in set(psutil.Process().children()) - before:
            if child.name() == "raylet":
                child.send_signal(signal.SIGKILL)
                return child.pid
        time.sleep(0.01)
    raise AssertionError("no raylet was started")
