"""Seconds of a step whose engines take prompts from a queue, compared with another checkout of RLJob.

    python -m bench.programs.rollout_queue --before CHECKOUT [--rounds N] [--smoke]

Records `bench/results/rollout_queue.json`. CHECKOUT has an earlier version, in which each engine got a fixed share of
the prompts, and rewards began when a whole share was complete. Both versions run the same jobs on a CPU, in turn, and
generate the same tokens: it fails unless all mean rewards are equal. Jobs, with random weights, and responses that end
by themselves after 1 to 192 tokens:

    slow reward     one engine; a reward takes 50 ms, in one process less than the machine has cores
    two engines     two engines that generate 16 of 80 sequences each at once; a reward takes no time

The first step of each run is warm-up and is not counted. Takes about 10 minutes on two
cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from bench.harness.record import RESULTS, record
from rljob_testing.repository import ROOT

PACKAGES = ("crds", "memory", "operator", "trainer", "cluster", "probe", "testing")
SHAPE = "hidden=64&layers=2&heads=4&kvHeads=2&headDim=32&tied=false&initializerRange=0.02"
REWARDS = ("slow_rewards.py", "spread_rewards.py")
WARM_UP_STEPS = 1

JOBS: dict[str, dict[str, Any]] = {
    "slow reward": {"task": {"reward": "slow_rewards:slow"}, "algorithm": {"promptsPerStep": 12}},
    "two engines": {
        "topology": "Disaggregated",
        "policy": {"gpusPerReplica": 0},
        "rollout": {"replicas": 2, "gpusPerReplica": 0, "maxConcurrentSequences": 16},
        "task": {"reward": "spread_rewards:spread"},
        "algorithm": {"promptsPerStep": 40},
    },
}


def manifest(job: str, steps: int, tokens: int) -> dict[str, Any]:
    spec = JOBS[job]
    common = {
        "groupSize": 4,
        "steps": steps,
        "maxPromptTokens": 16,
        "maxResponseTokens": tokens,
        "learningRate": 1.0e-9,  # the lengths of the responses stay as they are
    }
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": job.replace(" ", "-")},
        "spec": spec
        | {
            "model": {"uri": f"random://qwen3?{SHAPE}"},
            "task": {"name": "digits", **spec["task"]},
            "algorithm": common | spec["algorithm"],
            "checkpoint": {"everySteps": 1000},
        },
    }


def run(job: str, checkout: Path, steps: int, tokens: int) -> list[dict[str, Any]]:
    """The counted steps of the ledger."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "job.yaml"
        path.write_text(yaml.safe_dump(manifest(job, steps, tokens)))
        for rewards in REWARDS:
            shutil.copy(Path(__file__).parent / rewards, directory)
        variables = {"PYTHONPATH": os.pathsep.join(str(checkout / package) for package in PACKAGES)}
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "rljob_trainer",
            "run",
            path,
            "--output",
            f"{directory}/run",
            "--device",
            "cpu",
        ]
        subprocess.run(command, env=os.environ | variables, cwd=directory, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(directory) / "run" / "ledger.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"][WARM_UP_STEPS:]


def row(job: str, arm: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    phases = ("rollout", "reward", "update", "sync")
    return {
        "job": job,
        "arm": arm,
        "steps": len(steps),
        "seconds_by_phase": {
            phase: round(statistics.median(step["seconds"].get(phase, 0.0) for step in steps), 3) for phase in phases
        },
        "seconds_per_step": round(statistics.median(step["total_seconds"] for step in steps), 3),
        "least_seconds_per_step": round(min(step["total_seconds"] for step in steps), 3),
        "least_rollout_and_reward_seconds": round(
            min(step["seconds"]["rollout"] + step["seconds"]["reward"] for step in steps), 3
        ),
        "mean_response_tokens": round(statistics.mean(step["response"]["mean_tokens"] for step in steps), 1),
    }


def main(before: Path, rounds: int, smoke: bool, output: Path) -> None:
    arms = {"shares": before, "queue": ROOT}
    steps, tokens = (2, 16) if smoke else (6, 192)
    rows = []
    for job in JOBS:
        counted: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for _ in range(rounds):
            for arm, checkout in arms.items():
                counted[arm] += run(job, checkout, steps, tokens)
        rewards = {arm: [step["reward"]["mean"] for step in found] for arm, found in counted.items()}
        if rewards["shares"] != rewards["queue"]:
            raise SystemExit(f"expected the same rewards in both versions of the job {job}, found {rewards}")
        rows += [row(job, arm, found) for arm, found in counted.items()]
        print(*rows[-2:], sep="\n", flush=True)
    if not smoke:
        times = "one round" if rounds == 1 else f"{rounds} rounds"
        note = f"{times} of both versions in turn, medians over steps; random weights, groups of 4"
        print(record("rollout_queue", rows, note, output))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="tiny jobs; records nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    main(given.before.resolve(), given.rounds, given.smoke, given.output)
