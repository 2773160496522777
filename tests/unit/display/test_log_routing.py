"""Output on the terminal and in the log, in real processes with their file descriptors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rljob_testing.patience import PATIENCE_SECONDS
from rljob_trainer.display.log_routing import crash_report

ROUTED = """
import ctypes, logging, os, subprocess, sys
from pathlib import Path
import structlog
from rljob_trainer.display.log_routing import route_library_logs

print("before")
with route_library_logs(Path(sys.argv[1]), job="digits") as terminal:
    print("from print")
    logging.warning("from logging")
    os.write(2, b"from C\\n")
    subprocess.run(["sh", "-c", "echo from a child; echo and its stderr >&2"])
    structlog.get_logger().info("loaded", role="policy")
    print("on the screen", file=terminal.stdout)
    {end}
print("after")
"""


def run_routed(log: Path, end: str = "pass") -> subprocess.CompletedProcess[str]:
    script = ROUTED.replace("{end}", end)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", script, str(log)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment)


def test_only_the_display_reaches_the_terminal(tmp_path: Path) -> None:
    run = run_routed(tmp_path / "logs" / "controller.log")
    assert run.stdout.splitlines() == ["before", "on the screen", "after"]
    assert run.stderr == ""


def test_the_log_gets_everything_else_in_order(tmp_path: Path) -> None:
    run_routed(tmp_path / "controller.log")
    lines = (tmp_path / "controller.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("from")] == ["from print", "from C", "from a child"]
    assert "and its stderr" in lines
    assert any("from logging" in line for line in lines)


def test_structlog_writes_json_lines_with_the_job_s_name(tmp_path: Path) -> None:
    run_routed(tmp_path / "controller.log")
    (line,) = [line for line in (tmp_path / "controller.log").read_text().splitlines() if line.startswith("{")]
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {"job": "digits", "event": "loaded", "level": "info", "role": "policy"}


def test_an_exception_is_logged_and_the_terminal_is_restored(tmp_path: Path) -> None:
    run = run_routed(tmp_path / "controller.log", end="raise ValueError('seven')")
    assert "ValueError: seven" in (tmp_path / "controller.log").read_text()
    assert "ValueError: seven" in run.stderr, "the interpreter's own report comes after the routing"
    assert run.returncode == 1


def test_a_log_on_a_full_disk_replaces_no_error() -> None:
    script = (
        "import structlog\n"
        "from pathlib import Path\n"
        "from rljob_trainer.display.log_routing import route_library_logs\n"
        "with route_library_logs(Path('/dev/full'), job='digits'):\n"
        "    structlog.get_logger().info('lost')\n"
        "    raise ValueError('seven')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert run.stderr.splitlines()[-1] == "ValueError: seven"
    assert "No space left" not in run.stderr


def test_a_terminal_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom rljob_trainer.display.log_routing import route_library_logs\n"
        "with route_library_logs(Path(sys.argv[1]), job='digits') as terminal:\n"
        "    print('on the screen', file=terminal.stdout)\n    print('later')\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=PATIENCE_SECONDS)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "log").read_text() == "later\n"


def test_a_second_run_appends_to_the_log(tmp_path: Path) -> None:
    for _ in range(2):
        run_routed(tmp_path / "controller.log")
    assert (tmp_path / "controller.log").read_text().count("from a child") == 2


def test_a_crash_report_names_error_place_and_log_file() -> None:
    error: Exception
    try:
        json.loads("{")
    except ValueError as raised:
        error = raised
    report = crash_report(error, Path("logs/controller.log")).splitlines()
    assert report[0].startswith("unexpected json.decoder.JSONDecodeError: Expecting property name")
    assert report[1].startswith("  at ")
    assert report[-1] == "  the full traceback is in logs/controller.log"
    assert len(report) == 3
