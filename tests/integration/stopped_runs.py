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


def stop_at(step: int, who: str, how: signal.Signals, manifest: Path, output: Path) -> tuple[int, str]:
    """Run until `step` is committed, send `how` to the process of `who`, and wait for the end."""
    process = start_rljob("run", manifest, "--output", output, "--device", "cpu")
    ledger, deadline = output / "ledger.jsonl", Deadline(PATIENCE_SECONDS)
    while not (lines := _lines(ledger)) or lines[-1].get("step", 0) < step or lines[-1]["kind"] != "step":
        assert process.poll() is None, process.communicate()[0]
        assert not deadline.passed, f"step {step} was not reached"
        time.sleep(0.01)
    processes = [line for line in lines if line["kind"] == "attempt"][-1]["processes"]
    os.kill(processes[who], how)
    printed = wait_for_end(process, 120)
    return process.returncode, printed


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
