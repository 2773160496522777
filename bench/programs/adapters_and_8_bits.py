"""Jobs with low-rank adapters and with an engine in 8 bits: seconds by phase, peak GPU memory, engine against policy.

    python -m bench.programs.adapters_and_8_bits ARM... [--steps N]

Arms (16 prompts x 8 responses of 1,024 tokens a step, random weights in bfloat16, rank 16 on all linear layers):

    8b             Qwen3-8B's shape, adapters
    8b-fp8         the same with `rollout.quantization: Fp8PerTensor`
    8b-fp8-block   the same with Fp8PerBlock
    8b-fp8-kv      the same with Fp8PerTensor and `kvCacheDtype: Fp8`
    8b-40gib       Qwen3-8B's shape, adapters, where another process holds all but 40 GiB of the GPU and the memory plan
                   is that of such a GPU; 64 responses of 512 tokens
    8b-40gib-fp8   the same with Fp8PerTensor
    32b            Qwen3-32B's shape, adapters; its weights take 61 GiB of disk or, if that has no room, of /dev/shm,
                   from which they are removed at the end
    32b-fp8        the same with Fp8PerTensor

The memory plan is that of `Auto`. Adapters are exported alone: the merged model would take as much disk as the initial
one.

Records one row for each arm in `bench/results/adapters_and_8_bits.json`, after those that it already has. An arm that
fails is recorded with its message. The first step of each arm is warm-up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml

from bench.harness.device_memory import DevicePeak
from bench.harness.model_place import MEMORY, written_model
from bench.harness.needs import require_gpus
from bench.harness.record import RESULTS, record, recorded
from bench.harness.small_card import pinned_to_a_card
from rljob_api.job import RLJobSpec
from rljob_memory.plan import ModelShape
from rljob_memory.planning.model_size import shape_in_uri
from rljob_memory.sizes import GIB
from rljob_testing.ballast import ballast

NAME = "adapters_and_8_bits"
WARM_UP_STEPS = 1
SHAPES = {
    "8b": "hidden=4096&intermediate=12288&layers=36&heads=32",
    "32b": "hidden=5120&intermediate=25600&layers=64&heads=64",
}
ROLLOUTS: dict[str, dict[str, str]] = {
    "8b-fp8": {"quantization": "Fp8PerTensor"},
    "8b-fp8-block": {"quantization": "Fp8PerBlock"},
    "8b-fp8-kv": {"quantization": "Fp8PerTensor", "kvCacheDtype": "Fp8"},
    "8b-40gib-fp8": {"quantization": "Fp8PerTensor"},
    "32b-fp8": {"quantization": "Fp8PerTensor"},
}
ARMS = ["8b", "8b-fp8", "8b-fp8-block", "8b-fp8-kv", "8b-40gib", "8b-40gib-fp8", "32b", "32b-fp8"]
SMALL_CARD_BYTES = 40 * GIB


def main(arms: list[str], steps: int, output: Path, results: Path) -> None:
    require_gpus(1)
    try:
        run_arms(arms, steps, output, results)
    finally:
        shutil.rmtree(MEMORY, ignore_errors=True)


def run_arms(arms: list[str], steps: int, output: Path, results: Path) -> None:
    rows = recorded(NAME, results)
    for arm in arms:
        row = run_arm(arm, steps, output / arm)
        rows = [*(other for other in rows if other["arm"] != arm), row]
        note = "Qwen3 shapes, random weights, 128 responses of 1,024 tokens a step (40gib: 64 of 512), rank 16"
        print(json.dumps(row, indent=2))
        print(record(NAME, rows, note, results))


def run_arm(arm: str, steps: int, output: Path) -> dict[str, Any]:
    small = is_small(arm)
    manifest = manifest_of(arm, steps)
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    model = manifest["spec"]["model"]
    # Written first, so that the start-up time does not count it.
    directory = written_model(model["uri"], shape_of(spec_of(manifest)).weight_bytes)
    model["uri"] = f"file://{directory}"
    if small:
        manifest["spec"]["memory"] = pinned_to_a_card(manifest, SMALL_CARD_BYTES)
    path = output.parent / f"{arm}.yaml"
    path.write_text(yaml.safe_dump(manifest))
    shutil.copy(Path(__file__).parent / "spread_rewards.py", path.parent)
    begun = time.perf_counter()
    with ballast(leave_bytes=SMALL_CARD_BYTES) if small else nullcontext(), DevicePeak() as peak:
        done = subprocess.run([sys.executable, "-m", "rljob_trainer", "run", path, "--output", output], check=False)
    return {"arm": arm, "exit_code": done.returncode, "device_peak_bytes": peak.peak_bytes} | measured(
        output, time.perf_counter() - begun
    )


def is_small(arm: str) -> bool:
    return "40gib" in arm


def spec_of(manifest: dict[str, Any]) -> RLJobSpec:
    return RLJobSpec.model_validate(manifest["spec"], by_alias=True, by_name=False)


def shape_of(spec: RLJobSpec) -> ModelShape:
    shape = shape_in_uri(spec, bytes_per_parameter=2)
    assert shape is not None, "the arms name the sizes of their models"
    return shape


def manifest_of(arm: str, steps: int) -> dict[str, Any]:
    small = is_small(arm)
    shape = SHAPES[arm.partition("-")[0]]
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": f"bench-{arm}"},
        "spec": {
            "model": {
                "uri": f"random://qwen3?{shape}&kvHeads=8&headDim=128&vocabulary=151936&tied=false&dtype=bfloat16"
            },
            "task": {"name": "digits", "reward": "spread_rewards:spread"},
            "policy": {"lora": {"rank": 16, "alpha": 32, "export": "Adapter"}},
            "rollout": ROLLOUTS.get(arm, {}),
            "algorithm": {
                "steps": steps,
                "promptsPerStep": 8 if small else 16,
                "groupSize": 8,
                "maxPromptTokens": 16,
                "maxResponseTokens": 512 if small else 1024,
                "ignoreEndOfSequence": True,
                "learningRate": 1.0e-5,
            },
            "checkpoint": {"everySteps": 1000},
        },
    }


def measured(output: Path, whole_seconds: float) -> dict[str, Any]:
    """The medians of the steps after the warm-up, or the message of a run without them."""
    ledger, summary = output / "ledger.jsonl", output / "summary.json"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    steps = [line for line in lines if line["kind"] == "step"][WARM_UP_STEPS:]
    row: dict[str, Any] = {"whole_seconds": whole_seconds}
    if summary.exists():
        summary_json = json.loads(summary.read_text())
        row |= {"start_up_seconds": summary_json.get("startup_seconds"), "message": summary_json.get("exit_reason")}
    if plans := [line["plan"] for line in lines if line["kind"] == "attempt"]:
        row["plan"] = plans[0]
    if not steps:
        return row
    names = ("logprob_diff_mean", "logprob_diff_max", "importance_weight_mean", "grad_norm", "micro_batches")
    return row | {
        "steps": len(steps),
        "seconds_per_step": statistics.median(step["total_seconds"] for step in steps),
        "seconds_by_phase": {
            phase: statistics.median(step["seconds"][phase] for step in steps) for phase in steps[0]["seconds"]
        },
        "torch_peak_reserved_bytes": max(step["memory_bytes"]["policy-0"]["update"] for step in steps),
        "metrics": {name: [step["metrics"][name] for step in steps] for name in names},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", choices=ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--steps", type=int, default=4, help="steps of each arm, the warm-up included")
    parser.add_argument("--output", type=Path, default=Path("runs/adapters-and-8-bits"), help="of the runs (replaced)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
