"""Logs: a traceback is cheap in every format, however deep the stack."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, structlog
from rljob_operator.runtime.logs import set_up_logs
set_up_logs(sys.argv[1], "info")
def deeper(value): return deeper({"a": value})
try:
    deeper(1)
except RecursionError:
    import time
    began = time.process_time()
    structlog.get_logger("rljob_operator").exception("too deep")
    assert time.process_time() - began < 3, time.process_time() - began
"""


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_the_traceback_of_a_recursion_does_not_block_the_process(log_format: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert "too deep" in done.stderr
    assert "RecursionError" in done.stderr
