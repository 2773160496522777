"""Duties of the first process of a container, and of a worker before it has joined."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.termination_message import read_termination_message
from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_testing.runs import RLJOB, write_manifest
from rljob_trainer.pods.environment import TERMINATION_LOG_VARIABLE
from tests.unit.pods.pod_variables import pod_variables, write_settings

_UNDER_INIT = """
import os, signal, subprocess, sys, time
from functools import partial
from rljob_trainer.pods.init_process import continue_under_init
from rljob_trainer.pods.termination import report_silent_exit
continue_under_init(partial(report_silent_exit, os.environ))
"""
_IMPORTS_WHEN_TOLD = """
import sys, time
from pathlib import Path

class WhenTold:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            sys.meta_path.remove(self)
            print("imports", flush=True)
            while not Path(__file__).with_name("go-on").exists():
                time.sleep(0.01)

sys.meta_path.insert(0, WhenTold())
"""


def start(program: str, *arguments: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _UNDER_INIT + program, *map(str, arguments)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    assert any(text in line for line in iter(process.stdout.readline, ""))


@pytest.mark.parametrize(
    ("program", "exit_code", "expected"),
    [
        ("os._exit(1)", 1, "without an error message"),
        ("open(sys.argv[1], 'w').write('a word'); sys.exit(83)", 83, "a word"),
        ("os._exit(0)", 0, ""),
        ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL, ""),
    ],
)
def test_it_exits_as_its_program_and_reports_a_silent_exit(
    program: str, exit_code: int, expected: str, tmp_path: Path
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    process = start(program, log, **{TERMINATION_LOG_VARIABLE: str(log)})
    assert process.wait(timeout=PATIENCE_SECONDS) == exit_code
    assert expected in log.read_text()
    assert bool(log.read_text()) is bool(expected)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a first process: a namespace of its own")
@pytest.mark.parametrize("command", ["controller", "worker"])
def test_a_pod_deleted_during_its_imports_exits(command: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_IMPORTS_WHEN_TOLD)
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-m", "rljob_client", command],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "imports\n"
    [first] = psutil.Process(process.pid).children()
    first.terminate()
    (tmp_path / "go-on").touch()
    assert process.wait(timeout=PATIENCE_SECONDS) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_forwarded_to_the_program(number: signal.Signals) -> None:
    process = start(
        f"signal.signal({int(number)}, lambda *_: sys.exit(143)); print('ready', flush=True); time.sleep(300)"
    )
    wait_for_line(process, "ready")
    process.send_signal(number)
    assert process.wait(timeout=PATIENCE_SECONDS) == 143


def test_orphans_are_reaped_and_none_survives_the_container(tmp_path: Path) -> None:
    """`ray start` exits, and its servers keep running."""
    orphans = tmp_path / "orphans"
    process = start(
        "subprocess.run(['sh', '-c', 'sleep 0.1 & echo $! >$0; sleep 300 & echo $! >>$0', sys.argv[1]])\n"
        "print('ready', flush=True); time.sleep(300)",
        orphans,
    )
    try:
        wait_for_line(process, "ready")
        short, long = map(int, orphans.read_text().split())
        assert psutil.Process(long).ppid() == process.pid
        deadline = Deadline(PATIENCE_SECONDS)
        while psutil.pid_exists(short) and not deadline.passed:
            time.sleep(0.02)
        assert not psutil.pid_exists(short), "a zombie is left"
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=PATIENCE_SECONDS)
        assert not psutil.pid_exists(long), "an orphan outlives the container"
    finally:
        process.kill()


def start_worker(directory: Path, head: str, **variables: str) -> subprocess.Popen[str]:
    write_manifest(directory / "job.yaml", policy={"gpusPerReplica": 0})
    (directory / "run").mkdir()
    write_settings(directory)
    variables |= {"RLJOB_RAY_HEAD": head, "XDG_CACHE_HOME": str(directory / "cache")}
    environment = os.environ | pod_variables(directory, **variables)
    return subprocess.Popen(
        [RLJOB, "worker"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_waiting_worker_logs_the_reason_and_gives_up_eventually(tmp_path: Path) -> None:
    with socket.socket() as closed:  # bound, so that no other process takes its port, and without a listener
        closed.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{closed.getsockname()[1]}"
        worker = start_worker(tmp_path, head, RLJOB_JOIN_TIMEOUT_SECONDS="1")
        printed, _ = worker.communicate(timeout=PATIENCE_SECONDS)
    assert worker.returncode == ExitCode.WORKER_LOST, printed
    assert f"waiting for the controller's Ray at {head}" in printed
    assert "Connection refused" in printed
    assert "check the controller's pod" in printed
    message = read_termination_message((tmp_path / "termination-log").read_text())
    assert message is not None
    assert message.exit_code == ExitCode.WORKER_LOST
    assert not (tmp_path / "run" / "ready").exists()


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        ("3", "waiting for the controller's Ray at digits-controller.train.invalid:6379"),
        ("4", "waiting for attempt 4 with memory plan 1; the node still has attempt 3 with memory plan 1"),
    ],
    ids=["DNS", "settings of the attempt"],
)
def test_a_worker_waits_until_sigterm(attempt: str, expected: str, tmp_path: Path) -> None:
    worker = start_worker(tmp_path, "digits-controller.train.invalid:6379", RLJOB_ATTEMPT=attempt)
    wait_for_line(worker, expected)
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=PATIENCE_SECONDS)
    assert worker.returncode == ExitCode.TERMINATED
