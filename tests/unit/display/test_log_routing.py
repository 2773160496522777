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
    print("on the screen", file=terminal)
    {end}
print("after")
"""


def run(script: str, *arguments: object, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_SECONDS, env=environment
    )


def test_the_display_reaches_the_terminal_and_other_output_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "controller.log"
    for end in ("pass", "raise ValueError('seven')"):
        ended = run(ROUTED.replace("{end}", end), log)
    assert ended.stdout.splitlines() == ["before", "on the screen"]
    assert ended.stderr.splitlines()[-1] == "ValueError: seven", "the terminal is restored for the interpreter's report"
    assert ended.returncode == 1
    lines = log.read_text().splitlines()
    each = ["from print", "from C", "from a child"]
    assert [line for line in lines if line.startswith("from")] == each * 2, "a second run appends"
    assert "and its stderr" in lines
    assert any("from logging" in line for line in lines)
    assert "ValueError: seven" in lines
    event = json.loads(next(line for line in lines if line.startswith("{")))
    assert event.pop("timestamp").endswith("Z")
    assert event == {"job": "digits", "event": "loaded", "level": "info", "role": "policy"}


def test_a_run_without_an_error_has_the_terminal_back_afterwards(tmp_path: Path) -> None:
    ended = run(ROUTED.replace("{end}", "pass"), tmp_path / "controller.log")
    assert (ended.stdout.splitlines(), ended.stderr) == (["before", "on the screen", "after"], "")


SHORT = """
import sys, structlog
from pathlib import Path
from rljob_trainer.display.log_routing import route_library_logs
with route_library_logs(Path(sys.argv[1]), job="digits") as terminal:
    print("on the screen", file=terminal)
"""


def test_a_log_on_a_full_disk_replaces_no_error() -> None:
    ended = run(f"{SHORT}    structlog.get_logger().info('lost')\n    raise ValueError('seven')\n", "/dev/full")
    assert ended.stderr.splitlines()[-1] == "ValueError: seven"
    assert "No space left" not in ended.stderr


def test_a_terminal_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = run(f"{SHORT}    print('later')\n", tmp_path / "log", stdout=writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "log").read_text() == "later\n"


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
