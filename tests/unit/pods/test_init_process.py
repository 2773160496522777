"""Duties of the first process of a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_trainer.pods.environment import TERMINATION_LOG_VARIABLE

_UNDER_INIT = "from rljob_trainer.pods.init_process import continue_under_init; continue_under_init()\n"

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


def start(program: str, *arguments: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _UNDER_INIT + program, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("program", "exit_code"),
    [("pass", 0), ("raise SystemExit(83)", 83), ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)],
)
def test_it_exits_with_the_code_of_the_program(program: str, exit_code: int) -> None:
    assert start(program).wait(timeout=PATIENCE_SECONDS) == exit_code


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import os; os._exit(1)", "without an error message"),
        ("import sys; open(sys.argv[1], 'w').write('a word'); sys.exit(1)", "a word"),
        ("import os; os._exit(0)", ""),
        ("import os; os.kill(os.getpid(), 9)", ""),
    ],
)
def test_a_controller_without_a_message_is_reported(program: str, expected: str, tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    under_init = (
        "import os\n"
        "from functools import partial\n"
        "from rljob_trainer.pods.termination import report_silent_exit\n"
        "from rljob_trainer.pods.init_process import continue_under_init\n"
        "continue_under_init(partial(report_silent_exit, os.environ))\n"
    )
    variables = {**os.environ, TERMINATION_LOG_VARIABLE: str(log)}
    subprocess.run(
        [sys.executable, "-c", under_init + program, log], env=variables, timeout=PATIENCE_SECONDS, check=False
    )
    if expected:
        assert expected in log.read_text()
    else:
        assert log.read_text() == ""


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
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(143))\n"
        "print('ready', flush=True); time.sleep(300)"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(timeout=PATIENCE_SECONDS) == 143


def test_orphans_are_reaped_and_none_survives_the_container(tmp_path: Path) -> None:
    """As with `ray start`: it exits, and its servers keep running."""
    orphans = tmp_path / "orphans"
    process = start(
        "import subprocess, sys, time\n"
        "subprocess.run(['sh', '-c', 'sleep 0.1 & echo $! >$0; sleep 300 & echo $! >>$0', sys.argv[1]])\n"
        "print('ready', flush=True); time.sleep(300)",
        orphans,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
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


def test_the_program_is_a_child_of_it() -> None:
    process = start("import os; print(os.getppid(), flush=True)")
    printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert int(printed) == process.pid
    assert process.pid != os.getpid()
