"""A worker before it has joined."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.termination_message import read_termination_message
from rljob_testing.patience import PATIENCE_SECONDS
from rljob_testing.runs import RLJOB, write_manifest
from tests.unit.pods.pod_variables import pod_variables, write_settings


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections: bound, so that no other process takes it, and without a listener."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def start(directory: Path, head: str, **variables: str) -> subprocess.Popen[str]:
    write_manifest(directory / "job.yaml", policy={"gpusPerReplica": 0})
    (directory / "run").mkdir()
    write_settings(directory)
    environment = pod_variables(directory, RLJOB_RAY_HEAD=head, **variables)
    return subprocess.Popen(
        [RLJOB, "worker"],
        env={**os.environ, **environment, "XDG_CACHE_HOME": str(directory / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_waiting_worker_logs_the_reason_and_gives_up_eventually(tmp_path: Path, closed_port: int) -> None:
    worker = start(tmp_path, f"127.0.0.1:{closed_port}", RLJOB_JOIN_TIMEOUT_SECONDS="1")
    printed, _ = worker.communicate(timeout=PATIENCE_SECONDS)
    assert worker.returncode == ExitCode.WORKER_LOST, printed
    assert f"waiting for the controller's Ray at 127.0.0.1:{closed_port}" in printed
    assert "Connection refused" in printed
    assert "check the controller's pod" in printed
    message = read_termination_message((tmp_path / "termination-log").read_text())
    assert message is not None
    assert message.exit_code == ExitCode.WORKER_LOST
    assert not (tmp_path / "run" / "ready").exists()


def test_a_worker_waits_for_dns_until_sigterm(tmp_path: Path) -> None:
    worker = start(tmp_path, "digits-controller.train.invalid:6379")
    assert worker.stdout is not None
    lines = iter(worker.stdout.readline, "")
    assert any("waiting for the controller's Ray at digits-controller.train.invalid:6379" in line for line in lines)
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=PATIENCE_SECONDS)
    assert worker.returncode == ExitCode.TERMINATED


def test_sigterm_ends_the_wait_for_the_settings_of_an_attempt(tmp_path: Path) -> None:
    worker = start(tmp_path, "127.0.0.1:1", RLJOB_ATTEMPT="4")
    assert worker.stdout is not None
    lines = iter(worker.stdout.readline, "")
    expected = "waiting for attempt 4 with memory plan 1; the node still has attempt 3 with memory plan 1"
    assert any(expected in line for line in lines)
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=PATIENCE_SECONDS)
    assert worker.returncode == ExitCode.TERMINATED
