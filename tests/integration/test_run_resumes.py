"""After any kind of stop, the same command resumes at the first uncommitted step, with a bit-identical result."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_testing.patience import wait_for_end
from rljob_testing.runs import FinishedRun, rljob_run, start_rljob, write_manifest
from tests.integration.compared_runs import (
    MORE_STEPS_THAN_NEEDED,
    assert_same_end,
    committed_steps,
    completed_run,
    stop_after,
)
from tests.integration.test_ray_starts_again import path_that_holds

JOB: dict[str, dict[str, Any]] = {
    "algorithm": {"promptsPerStep": 4, "groupSize": 4},
    "checkpoint": {"everySteps": 4, "keep": 2},
    # A lost process ends the run, as it does where somebody else begins the next attempt.
    "recovery": {"maxRestarts": 0},
}


def manifest_of(directory: Path, steps: int) -> Path:
    return write_manifest(directory / f"job-{steps}.yaml", **JOB | {"algorithm": JOB["algorithm"] | {"steps": steps}})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run that was stopped in every way, and then completed."""
    directory = tmp_path_factory.mktemp("stopped")
    endless, output = manifest_of(directory, MORE_STEPS_THAN_NEEDED), directory / "run"
    code, printed = stop_after(2, "controller", signal.SIGTERM, endless, output)
    assert code == ExitCode.TERMINATED, printed
    assert "run the same command" in printed
    code, printed = stop_after(2, "controller", signal.SIGINT, endless, output)
    assert code == ExitCode.INTERRUPTED, printed
    code, printed = stop_after(6, "controller", signal.SIGKILL, endless, output)
    assert code == -signal.SIGKILL
    corrupt = corrupt_newest_checkpoint(output)
    code, printed = stop_after(1, "rollout-0", signal.SIGKILL, endless, output)
    assert code == ExitCode.WORKER_LOST, printed
    assert "rollout-0" in printed
    assert f"the checkpoint of step {corrupt} is not used" in printed
    return completed_run(manifest_of(directory, committed_steps(output) + 3), output)


@pytest.fixture(scope="module")
def uninterrupted(stopped: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run of as many steps, without a stop."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    return completed_run(manifest_of(directory, len(stopped.steps)), directory / "run")


@pytest.fixture
def manifest(uninterrupted: FinishedRun, tmp_path: Path) -> Path:
    return manifest_of(tmp_path, len(uninterrupted.steps))


def test_a_run_stopped_in_every_way_ends_with_the_same_weights_and_rewards(
    stopped: FinishedRun, uninterrupted: FinishedRun
) -> None:
    assert [step["step"] for step in stopped.steps] == list(range(1, len(stopped.steps) + 1))
    assert len(stopped.attempts) == 5
    assert_same_end(stopped, uninterrupted)


def corrupt_newest_checkpoint(output: Path) -> int:
    """Change a byte of the newest checkpoint of several; returns its step."""
    whole = (output / "checkpoints").glob("step-" + "[0-9]" * 6)  # one that was being written has a longer name
    newest, *others = sorted(whole, reverse=True)
    assert others
    shard = next(newest.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return int(newest.name.removeprefix("step-"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
@pytest.mark.parametrize("size", ["600k", pytest.param("3500k", marks=pytest.mark.long)])
def test_a_disk_that_fills_up_loses_nothing(
    manifest: Path, uninterrupted: FinishedRun, tmp_path: Path, size: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        full = rljob_run(manifest, disk / "run")
        assert full.exit_code == ExitCode.OUTPUT_UNAVAILABLE, full.printed
        assert "disk is full" in full.printed
        assert "Traceback" not in full.printed
        assert len(full.printed.split("disk is full")[1].splitlines()) < 20

        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        assert_same_end(completed_run(manifest, disk / "run"), uninterrupted)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_ctrl_c_during_start_up_stops_at_once(manifest: Path, tmp_path: Path) -> None:
    held = path_that_holds(("default_worker.py",), tmp_path / "held", until=tmp_path / "never")
    process = start_rljob("run", manifest, "--output", tmp_path / "run", "--device", "cpu", PYTHONPATH=held)
    wait_for_line(process, "starting the policy")
    time.sleep(3)  # until it waits in Ray
    process.send_signal(signal.SIGINT)
    printed = wait_for_end(process)
    assert process.returncode == ExitCode.INTERRUPTED, printed
    assert "SIGINT: stopping\n" in printed
    assert "loading the policy" not in printed
    assert "Traceback" not in printed


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout
    assert any(text in line for line in process.stdout), f"expected a line with {text!r}, found the end"


def test_a_finished_run_started_again_reports_it_and_changes_nothing(
    manifest: Path, uninterrupted: FinishedRun
) -> None:
    before = (uninterrupted.output / "ledger.jsonl").read_bytes()
    again = rljob_run(manifest, uninterrupted.output)
    assert again.exit_code == ExitCode.COMPLETE
    assert "complete" in again.printed
    assert (uninterrupted.output / "ledger.jsonl").read_bytes() == before
