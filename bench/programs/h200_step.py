"""Seconds per step and peak memory of `rljob run` and of TRL's GRPO on one GPU, with the workload of h200_step.yaml.

    python -m bench.programs.h200_step [--profile]

Records `bench/results/h200_step.json`. If TRL is not installed, only RLJob runs and the record is
`h200_step_alone.json`. Peak GPU memory counts all processes and is sampled from the driver every 20 ms. The first two
steps of each arm are warm-up and are not counted. `--profile` records nothing: it runs RLJob alone, and writes a trace
of one update to `profile/` of the output directory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness.device_memory import DevicePeak
from bench.harness.record import RESULTS, record
from rljob_trainer.policy.profile import PROFILE_STEP

MANIFEST = Path(__file__).parent / "h200_step.yaml"
WARM_UP_STEPS = 2
COMPLETIONS, RESPONSE_TOKENS = 128, 512


def main(output: Path, results: Path, profile: bool) -> None:
    if profile:
        rljob_arm(output, {PROFILE_STEP: str(WARM_UP_STEPS + 1)})
        for table in sorted((output / "profile").glob("*.txt")):
            print(table, table.read_text(), sep="\n")
        return
    rows = [rljob_arm(output)]
    if importlib.util.find_spec("trl"):
        rows.append(trl_arm())
    note = f"Qwen3-0.6B shape, random weights, {COMPLETIONS} completions of {RESPONSE_TOKENS} tokens a step"
    print(record("h200_step" if len(rows) > 1 else "h200_step_alone", rows, note, results))
    for row in rows:
        print(
            f"{row['arm']:>6}: {row['seconds_per_step']:.2f} s/step, {row['tokens_per_second']:,.0f} tokens/s, "
            f"peak {row['device_peak_bytes'] / 2**30:.1f} GiB of the device"
        )


def rljob_arm(output: Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    shutil.rmtree(output, ignore_errors=True)
    begun = time.perf_counter()
    with DevicePeak() as peak:
        subprocess.run(
            [sys.executable, "-m", "rljob_trainer", "run", MANIFEST, "--output", output],
            check=True,
            env={**os.environ, **(environment or {})},
        )
    lines = [json.loads(line) for line in (output / "ledger.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"][WARM_UP_STEPS:]
    seconds = statistics.median(step["total_seconds"] for step in steps)
    phases = {phase: statistics.median(step["seconds"][phase] for step in steps) for phase in steps[0]["seconds"]}
    return {
        "arm": "rljob",
        "seconds_per_step": seconds,
        "seconds_by_phase": phases,
        "tokens_per_second": COMPLETIONS * RESPONSE_TOKENS / seconds,
        "device_peak_bytes": peak.peak_bytes,
        "torch_peak_reserved_bytes": max(step["memory_bytes"]["policy-0"]["update"] for step in steps),
        "start_up_seconds": json.loads((output / "summary.json").read_text())["startup_seconds"],
        "whole_seconds": time.perf_counter() - begun,
        "logprob_diff_mean": statistics.median(step["metrics"]["logprob_diff_mean"] for step in steps),
        "plan": lines[0]["plan"],
    }


def trl_arm() -> dict[str, Any]:
    from rljob_api.manifest import load_manifest
    from rljob_trainer.models.resolve import resolve_model

    model = resolve_model(load_manifest(MANIFEST).spec.model.uri)
    done = subprocess.run(
        [sys.executable, "-m", "bench.programs.trl_steps", model], check=True, stdout=subprocess.PIPE, text=True
    )
    return {"arm": "trl", **json.loads(done.stdout.splitlines()[-1])}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/h200-step"), help="of the run (replaced)")
    parser.add_argument("--profile", action="store_true", help="profile one update instead of recording")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
