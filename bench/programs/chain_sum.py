"""SmolLM2-135M-Instruct learns to add two one-digit numbers: rewards by step, seconds and memory.

    python -m bench.programs.chain_sum [ARM] [--device auto|cpu|cuda] [--steps N] [--output DIR]

Arms, each with the name of its result in `bench/results/`:

    weights    all weights (`examples/smollm2-chain-sum.yaml`): `smollm2_chain_sum`
    adapters   low-rank adapters (`examples/smollm2-lora.yaml`): `smollm2_lora`

Needs the model in the local cache (`make model`). 80 steps take two minutes on a GPU and ten on two CPU cores.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.harness.record import RESULTS, record
from rljob_api.exit_codes import ExitCode
from rljob_client.run_directory.ledger import read_ledger
from rljob_client.run_directory.records import LedgerRecord, step_records
from rljob_client.run_directory.summary import summarize
from rljob_testing.repository import EXAMPLES

ARMS: dict[str, tuple[str, Path]] = {
    "weights": ("smollm2_chain_sum", EXAMPLES / "smollm2-chain-sum.yaml"),
    "adapters": ("smollm2_lora", EXAMPLES / "smollm2-lora.yaml"),
}
"""Name of the result, and manifest."""
GOAL = 0.9


def main(arm: str, device: str, steps: int, output: Path) -> None:
    name, manifest = ARMS[arm]
    job = yaml.safe_load(manifest.read_text())
    job["spec"]["algorithm"]["steps"] = steps
    with tempfile.TemporaryDirectory() as directory:
        path, run = Path(directory) / "job.yaml", Path(directory) / "run"
        path.write_text(yaml.safe_dump(job))
        command = [sys.executable, "-m", "rljob_client", "run", str(path), "--output", str(run), "--device", device]
        subprocess.run(command, check=True)
        records = read_ledger(run / "ledger.jsonl").records
    note = (
        f"{manifest.name}: reasoning-gym's chain_sum, two one-digit numbers; rewards are means of 64 responses a step"
    )
    print(record(name, [row(records, steps)], note, output))


def row(records: Sequence[LedgerRecord], total_steps: int) -> dict[str, Any]:
    """The result of a complete run of `total_steps`, from its ledger."""
    done = step_records(records)
    summary = summarize(records, job="", total_steps=total_steps, exit_code=ExitCode.COMPLETE)
    rewards = [step.reward.mean for step in done]
    seconds = [step.total_seconds for step in done]
    return {
        "steps": summary.steps,
        "first_reward": summary.first_reward,
        "last_reward": summary.last_reward,
        f"first_step_with_mean_of_five_above_{GOAL}": first_step_at_goal(rewards),
        "start_up_seconds": summary.startup_seconds,
        "first_step_seconds": seconds[0],
        "median_step_seconds": statistics.median(seconds),
        "peak_memory_gib": {role: peak.model_dump() for role, peak in summary.peak_memory.items()},
        "rewards": [round(reward, 4) for reward in rewards],
    }


def first_step_at_goal(rewards: Sequence[float]) -> int | None:
    """The first step, counted from 1, that ends five whose mean reward is at least the goal; None: no such step."""
    fives = (rewards[end - 5 : end] for end in range(5, len(rewards) + 1))
    return next((step for step, five in enumerate(fives, start=5) if statistics.fmean(five) >= GOAL), None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", nargs="?", choices=ARMS, default="weights", help="default: %(default)s")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    main(**vars(parser.parse_args()))
