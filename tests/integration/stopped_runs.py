"""Stops `rljob run` at a step, and compares the ends of two runs."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from rljob_testing.patience import PATIENCE_SECONDS, Deadline, wait_for_end
from rljob_testing.runs import Run, start_rljob

MORE_STEPS_THAN_NEEDED = 100_000
"""Of a job that is stopped: with few, it may be complete before the test has seen a step."""


def stop_after(
    steps: int, who: str, how: signal.Signals, manifest: Path, output: Path, *options: str
) -> tuple[int, str]:
    """Run until this run has committed `steps`, send `how` to the process of `who`, and wait for the end."""
    ledger, deadline = output / "ledger.jsonl", Deadline(PATIENCE_SECONDS)
    before = len(_lines(ledger))
    process = start_rljob("run", manifest, "--output", output, "--device", "cpu", *options)
    while _committed(lines := _lines(ledger)[before:]) < steps:
        assert process.poll() is None, process.communicate()[0]
        assert not deadline.passed, f"{steps} steps were not reached"
        time.sleep(0.01)
    processes = [line for line in lines if line["kind"] == "attempt"][-1]["processes"]
    os.kill(processes[who], how)
    printed = wait_for_end(process, PATIENCE_SECONDS)
    return process.returncode, printed


def committed_steps(output: Path) -> int:
    return _committed(_lines(output / "ledger.jsonl"))


def _committed(lines: list[dict[str, Any]]) -> int:
    return sum(line["kind"] == "step" for line in lines)


def _lines(ledger: Path) -> list[dict[str, Any]]:
    if not ledger.exists():
        return []
    whole_lines = ledger.read_text().rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in whole_lines]


def assert_same_end(run: Run, other: Run) -> None:
    weights, expected = (load_file(r.output / "model" / "model.safetensors") for r in (run, other))
    assert weights.keys() == expected.keys()
    for name in weights:
        np.testing.assert_array_equal(weights[name], expected[name], err_msg=name)
    assert [s["reward"]["mean"] for s in run.steps] == [s["reward"]["mean"] for s in other.steps]
