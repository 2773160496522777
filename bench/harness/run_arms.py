"""Arms of a comparison: jobs that differ in their manifests, each run by `rljob run` and measured from its records."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.harness.gpu_use import GpuUse, idle_of_each_gpu
from bench.harness.needs import require_gpus
from bench.harness.record import RESULTS, record, recorded

GPUS = 2
"""Of every comparison."""
WARM_UP_STEPS = 1
REWARDS = Path(__file__).parents[1] / "programs" / "spread_rewards.py"


@dataclass(frozen=True, slots=True)
class Arms:
    """A comparison of jobs with random weights, a row for each arm."""

    name: str
    """Of the result, and of the directory of the runs."""
    names: Sequence[str]
    """Of the arms."""
    spec: Callable[[str, int, bool], dict[str, Any]]
    """The RLJob's spec from arm, number of steps, and whether it is a smoke run."""
    figures: Callable[[str, list[dict[str, Any]], dict[str, Any]], dict[str, Any]]
    """Further figures from arm, counted steps of the ledger, and the figures of all comparisons. These are seconds per
    step and phase, tokens/s, idle share of each GPU, and log-probabilities of the engine against the policy's."""
    note: str
    """Of the record."""
    steps: int
    """Steps of each arm by default, the warm-up included."""
    smoke_options: Sequence[str] = ()
    """Of `rljob run` in a smoke run."""
    check_smoke: Callable[[dict[str, Any]], None] = lambda _row: None
    """Raises AssertionError if the row of a smoke run is wrong."""
    smoke_names: Sequence[str] = ()
    """Arms of a smoke run, if none is given."""

    def main(self, description: str | None) -> None:
        """Parse the command line and run the arms. Rows of other arms that the result already has are kept."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("arms", nargs="*", choices=[*self.names, []], metavar="ARM", help=", ".join(self.names))
        parser.add_argument("--steps", type=int, default=self.steps, help="steps of each arm, the warm-up included")
        parser.add_argument("--smoke", action="store_true", help="a tiny model; records nothing")
        parser.add_argument("--output", type=Path, default=Path("runs") / self.name, help="of the runs (replaced)")
        parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
        given = parser.parse_args()
        if not given.smoke:
            require_gpus(GPUS)
        rows = [] if given.smoke else recorded(self.name, given.results, GPUS)
        for arm in given.arms or (given.smoke and self.smoke_names) or self.names:
            row = self._run(arm, given.steps, given.smoke, given.output / arm)
            print(json.dumps(row, indent=2), flush=True)
            if given.smoke:
                assert row["exit_code"] == 0, f"the arm {arm} failed"
                self.check_smoke(row)
                continue
            rows = [*(other for other in rows if other["arm"] != arm), row]
            print(record(self.name, rows, self.note, given.results, gpus=GPUS), flush=True)

    def _run(self, arm: str, steps: int, smoke: bool, output: Path) -> dict[str, Any]:
        shutil.rmtree(output, ignore_errors=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": f"bench-{arm}"}}
        path = output.parent / f"{arm}.yaml"
        # A job that is measured is killed before its last step, which would write a checkpoint and the model.
        path.write_text(yaml.safe_dump(job | {"spec": self.spec(arm, steps if smoke else steps + 1, smoke)}))
        shutil.copy(REWARDS, path.parent)
        options = self.smoke_options if smoke else ()
        command = [sys.executable, "-m", "rljob_trainer", "run", str(path), "--output", str(output), *options]
        with GpuUse() as use:
            exit_code = subprocess.run(command, check=False).returncode if smoke else _run_steps(command, output, steps)
        return {"arm": arm, "exit_code": exit_code} | self._measured(arm, output, use)

    def _measured(self, arm: str, output: Path, use: GpuUse) -> dict[str, Any]:
        lines = _ledger_of(output)
        steps = [line for line in lines if line["kind"] == "step"][WARM_UP_STEPS:]
        if not steps:
            return {}
        common = {
            "seconds_per_step": statistics.median(step["total_seconds"] for step in steps),
            "seconds_by_phase": {
                phase: statistics.median(step["seconds"].get(phase, 0.0) for step in steps)
                for phase in steps[0]["seconds"]
            },
            "tokens_per_second": statistics.median(step["tokens"] / step["total_seconds"] for step in steps),
            "idle_share_of_gpus": idle_of_each_gpu(use.samples, steps),
            "logprob_diff_mean": statistics.mean(step["metrics"]["logprob_diff_mean"] for step in steps),
            "logprob_diff_max": max(step["metrics"]["logprob_diff_max"] for step in steps),
        }
        return {
            **common,
            **self.figures(arm, steps, common),
            "memory": {log.stem: memory_of(log) for log in sorted((output / "memory").glob("*-*.jsonl"))},
            "plan": next(line["plan"] for line in lines if line["kind"] == "attempt"),
        }


def _run_steps(command: list[str], output: Path, steps: int) -> int:
    """Run a job and kill it after `steps` steps: 0. Otherwise its exit code."""
    job = subprocess.Popen(command, start_new_session=True)
    try:
        while job.poll() is None:
            if sum(line["kind"] == "step" for line in _ledger_of(output)) >= steps:
                return 0
            time.sleep(0.2)
        return job.returncode
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _ledger_of(output: Path) -> list[dict[str, Any]]:
    file = output / "ledger.jsonl"
    return _complete_lines(file) if file.exists() else []


def _complete_lines(file: Path) -> list[dict[str, Any]]:
    """Without a last line that a killed process has not completed."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def generating_job(shape: str, steps: int, prompts: int, group_size: int, response_tokens: int) -> dict[str, Any]:
    """The part of a spec that the arms share: random weights of `shape`, responses of exactly `response_tokens`."""
    return {
        "model": {"uri": f"random://qwen3?{shape}"},
        "task": {"name": "digits", "reward": "spread_rewards:spread"},
        "algorithm": {
            "steps": steps,
            "promptsPerStep": prompts,
            "groupSize": group_size,
            "maxPromptTokens": 16,
            "maxResponseTokens": response_tokens,
            "ignoreEndOfSequence": True,
            "learningRate": 1.0e-5,
        },
        "checkpoint": {"everySteps": 1000},
    }


def memory_of(log: Path) -> dict[str, int]:
    """Largest values of one process: all memory in use on its GPU, its own part of that, and its host memory."""
    samples = _complete_lines(log)
    return {
        "gpu_used_bytes": max(each["device_total_bytes"] - each.get("device_free_bytes", 0) for each in samples),
        "peak_reserved_bytes": max(each.get("peak_reserved_bytes", 0) for each in samples),
        "peak_rss_bytes": max(each.get("peak_rss_bytes", 0) for each in samples),
    }
