"""Jobs of the runs that are compared; stops of `rljob run` at a step; and the comparison."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

from rljob_api.exit_codes import ExitCode
from rljob_testing.patience import PATIENCE_SECONDS, Deadline, wait_for_end
from rljob_testing.runs import FinishedRun, rljob_run, start_rljob, write_manifest

MORE_STEPS_THAN_NEEDED = 100_000
"""Steps of a job that is stopped: with few, it may be complete before the test has seen a step."""


LARGE_MODEL = "random://qwen3?hidden=128&layers=4&heads=4&kvHeads=2&headDim=32&tied=false&initializerRange=0.1"
"""Its 4 MB of weights can be sent in two halves."""

ROOMY_PLAN = {
    "empty_cache": False,
    "expandable_segments": False,
    "rollout_sleep": "Disabled",
    "kv_cache_bytes": 256 << 20,
    "micro_batch_tokens": 192,
    "logprob_chunk_tokens": 8192,
    "activation_checkpointing": False,
    "optimizer_offload": False,
    "sync_bucket_bytes": 256 << 20,
}
"""A plan with settings to reduce: the plan computed for so small a model has none."""


def disaggregated_manifest(path: Path, **changes: dict[str, Any]) -> Path:
    """Write a manifest like `write_manifest`, with separate processes for engines."""
    job = yaml.safe_load(write_manifest(path, **changes).read_text())
    job["spec"]["topology"] = "Disaggregated"
    path.write_text(yaml.safe_dump(job))
    return path


def completed_run(manifest: Path, output: Path, *options: str | Path) -> FinishedRun:
    """A run to the end of the job."""
    run = rljob_run(manifest, output, *options)
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    return run


def plan_changes(run: FinishedRun) -> list[dict[str, Any]]:
    """The latest record of each change of the plan."""
    records = [line["change"] for line in run.ledger if line["kind"] == "plan_change"]
    return list({change["generation"]: change for change in records}.values())


def injected(run: FinishedRun) -> list[tuple[str, str]]:
    """The class and the phase of each fault that occurred."""
    return [(line["fault_class"], line["phase"]) for line in run.ledger if line["kind"] == "fault"]


def weights(run: FinishedRun) -> dict[str, Any]:
    return dict(load_file(run.output / "model" / "model.safetensors"))


def assert_same_weights(run: FinishedRun, other: FinishedRun, tolerance: float = 0.0) -> None:
    found, expected = weights(run), weights(other)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=tolerance, err_msg=name)


def stop_after(
    steps: int, who: str, how: signal.Signals, manifest: Path, output: Path, *options: str, **environment: str
) -> tuple[int, str]:
    """Run until this run has committed `steps`, send `how` to the process of `who`, and wait for the end."""
    ledger, deadline = output / "ledger.jsonl", Deadline(PATIENCE_SECONDS)
    before = len(_lines(ledger))
    process = start_rljob("run", manifest, "--output", output, "--device", "cpu", *options, **environment)
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


def assert_same_end(run: FinishedRun, other: FinishedRun) -> None:
    assert_same_weights(run, other)
    assert [s["reward"]["mean"] for s in run.steps] == [s["reward"]["mean"] for s in other.steps]


def assert_same_ledger(run: FinishedRun, other: FinishedRun) -> None:
    """All that the ledger has of each step and that follows from the job alone."""
    names = ("step", "reward", "response", "tokens", "weights_version", "metrics")
    assert [[step[name] for name in names] for step in run.steps] == [
        [step[name] for name in names] for step in other.steps
    ]
