"""A run whose policy runs out of memory on one rank, and continues on two from the checkpoint and the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rljob_api.exit_codes import ExitCode
from rljob_testing.runs import Run, rljob_run, write_manifest

JOB: dict[str, dict[str, Any]] = {
    "policy": {"gpusPerReplica": 0},
    "algorithm": {"steps": 4, "promptsPerStep": 4, "groupSize": 8, "learningRate": 1.0e-4},
    "checkpoint": {"everySteps": 2},
    "recovery": {"maxAdjustments": 0, "maxGpus": 2},
}
FAULT = {"class": "OptimizerState", "phase": "update", "step": 4}


def run(directory: Path, faults: list[dict[str, Any]]) -> Run:
    directory.mkdir()
    manifest = write_manifest(directory / "job.yaml", **JOB, faultInjection={"enabled": bool(faults), "faults": faults})
    finished = rljob_run(manifest, directory / "run")
    assert finished.exit_code == ExitCode.COMPLETE, finished.printed
    return finished


@pytest.mark.long
def test_the_failed_step_is_repeated_on_more_ranks_with_the_same_rollouts(tmp_path: Path) -> None:
    grown, whole = run(tmp_path / "grown", [FAULT]), run(tmp_path / "whole", [])

    change = next(line["change"] for line in grown.ledger if line["kind"] == "plan_change")
    assert (change["remedy"]["setting"], change["remedy"]["before"], change["remedy"]["after"]) == (
        "policyGpus",
        "1",
        "2",
    )
    assert (change["level"], change["step"]) == ("RestartInPlace", 4)
    assert "PlanChanged: policyGpus 1 → 2 (generation 2" in grown.printed
    assert [len(attempt["processes"]) for attempt in grown.attempts] == [3, 5], "controller, ranks and engines"
    restored = [line for line in grown.ledger if line["kind"] == "restore"][-1]
    assert (restored["attempt"], restored["checkpoint_step"], restored["replayed_steps"]) == (2, 2, 1)

    assert [step["attempt"] for step in grown.steps] == [1, 1, 1, 2]
    assert [step["reward"] for step in grown.steps] == [step["reward"] for step in whole.steps]
    failed, expected = grown.steps[-1]["metrics"], whole.steps[-1]["metrics"]
    assert failed["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert failed["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    weights = load_file(grown.output / "model" / "model.safetensors")
    for name, of_one_rank in load_file(whole.output / "model" / "model.safetensors").items():
        np.testing.assert_allclose(weights[name], of_one_rank, rtol=0, atol=1e-6, err_msg=name)
