"""The gate of speed, with a tiny model on this machine: a record, and what is slower than it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_testing.repository import ROOT
from rljob_testing.runs import warm_start
from rljob_trainer.roles.warm.setup_worker import DIRECTORY_VARIABLE


def gate(output: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of the program, whose run starts warm."""
    command = [sys.executable, "-m", "bench.programs.gate", "--smoke", "--output", str(output / "run")]
    command += ["--results", str(output / "records"), *options]
    environment = {**os.environ, DIRECTORY_VARIABLE: str(warm_start().directory)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run and its record."""
    output = tmp_path_factory.mktemp("gate")
    code, text = gate(output, "--steps", "5")
    assert code == 0
    assert "there is no record of" in text
    code, text = gate(output, "--reuse", "--record")
    assert code == 0
    assert "recorded in" in text
    return output


def change_record(output: Path, phase: str, factor: float, **values: object) -> None:
    [file] = (output / "records").glob("*.json")
    record = json.loads(file.read_text())
    [row] = record["rows"]
    row["seconds"][phase] = [factor * value for value in row["seconds"][phase]]
    file.write_text(json.dumps(record | {"rows": [row | values]}))


def test_a_run_is_not_slower_than_itself_and_its_record_names_the_machine(measured: Path) -> None:
    code, text = gate(measured, "--reuse")
    assert code == 0, text
    [file] = (measured / "records").glob("*.json")
    record = json.loads(file.read_text())
    [row] = record["rows"]
    assert row["processor"] in record["kind"]
    assert row["counted_steps"] == 3
    assert {"start", "step", "rollout", "update", "sync"} <= set(row["seconds"])
    assert all(low <= middle <= high for low, middle, high in row["seconds"].values())


def test_slower_phases_fail_and_a_start_with_other_caches_does_not(measured: Path) -> None:
    is_warm = json.loads((measured / "run" / "gate.json").read_text())["warm_start"]
    for phase in ("rollout", "sync"):
        change_record(measured, phase, 0.01)  # less than any spread of three steps
    change_record(measured, "start", 0.5, warm_start=not is_warm)
    code, text = gate(measured, "--reuse")
    for phase in ("rollout", "sync"):
        change_record(measured, phase, 100.0)
    change_record(measured, "start", 2.0, warm_start=is_warm)
    assert code == 1
    assert "json: rollout, sync\n" in text
    assert "not compared" in text


def test_a_value_that_is_no_number_fails(measured: Path) -> None:
    file = measured / "run" / "gate.json"
    before = file.read_text()
    found = json.loads(before)
    found["seconds"]["sync"] = [float("nan")] * 3
    file.write_text(json.dumps(found))
    code, _ = gate(measured, "--reuse")
    file.write_text(before)
    assert code == 1
