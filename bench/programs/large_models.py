"""Full fine-tuning of large models on one GPU: seconds by phase and peak GPU memory, RLJob and TRL.

    python -m bench.programs.large_models ARM... [--steps N] [--smoke]

Arms (Qwen3's shapes, random weights in bfloat16, 16 prompts × 8 responses of 1,024 tokens a step, or 512 with 0.6B):
    0.6b           the optimizer's state on the GPU
    0.6b-padded    the same with padded sequences
    4b, 8b         the state where the memory plan puts it
    8b-padded      8b with padded sequences
    8b-cold        8b with empty compile caches
    8b-bfloat16    8b with `policy.optimizer.moments: bfloat16`
    8b-int8        8b with `policy.optimizer.moments: int8`
    8b-fp8         8b with `rollout.quantization: Fp8PerTensor`
    8b-warm        8b once more, to see how long it takes to start after `8b` has filled the compile caches
    8b-80gib       where another process holds all but 79 GiB, with the memory plan of such a GPU
    14b            `moments: bfloat16`, for the host's memory
    0.6b-trl       TRL's GRPOTrainer, colocated with vLLM, float32 weights
    8b-trl         the same in bfloat16 with gradient checkpointing
    8b-trl-float32 the same with float32 weights, until it runs out of memory

Records one row for each arm in `bench/results/large_models.json`, after those that it already has. An arm that fails is
recorded with its message. The first two steps of an arm are warm-up and are not counted. `--smoke` runs a tiny model on
any device instead, and records nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import yaml

from bench.harness.device_memory import DevicePeak
from bench.harness.needs import require_gpus, require_package
from bench.harness.record import RESULTS, record, recorded
from bench.harness.shapes import SHAPES
from bench.harness.small_card import pinned_to_a_card
from rljob_memory.sizes import GIB
from rljob_testing.ballast import ballast
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.pods.compile_cache import CompileCache
from rljob_trainer.policy.packed_attention import ENABLED

NAME = "large_models"
WARM_UP_STEPS = 2
_OF_8B = ["8b", "8b-padded", "8b-bfloat16", "8b-int8", "8b-fp8", "8b-cold", "8b-warm", "8b-80gib"]
RLJOB_ARMS = ["0.6b", "0.6b-padded", "4b", *_OF_8B, "14b"]
TRL_ARMS: dict[str, list[str]] = {
    "0.6b-trl": [],
    "8b-trl": ["--dtype", "bfloat16", "--gradient-checkpointing", "--micro-batch", "8"],
    "8b-trl-float32": ["--gradient-checkpointing", "--micro-batch", "8", "--given-up-on-memory"],
}
ARMS = [*RLJOB_ARMS, *TRL_ARMS]
ENGINE_AGAINST_POLICY = ("logprob_diff_mean", "logprob_diff_max", "importance_weight_mean", "importance_weight_max")
SMALL_CARD_BYTES = 79 * GIB
"""Memory that CUDA reports for an H100 of 80 GB."""


def main(arms: list[str], steps: int, smoke: bool, output: Path, results: Path) -> None:
    if not smoke:
        require_gpus(1)
        if set(arms) & set(TRL_ARMS):
            require_package("trl")
    rows = [] if smoke else recorded(NAME, results)
    for arm in ["smoke"] if smoke else arms:
        row = trl_arm(arm, steps) if arm in TRL_ARMS else rljob_arm(arm, steps, output / arm)
        print(json.dumps(row, indent=2), flush=True)
        if not smoke:
            rows = [*(other for other in rows if other["arm"] != arm), row]
            note = "Qwen3 shapes, random weights, all weights trained, 128 responses of 1,024 tokens a step (0.6b: 512)"
            print(record(NAME, rows, note, results), flush=True)


def rljob_arm(arm: str, steps: int, output: Path) -> dict[str, Any]:
    manifest = manifest_of(arm, steps)
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    resolve_model(manifest["spec"]["model"]["uri"])  # written first, so that the start-up time does not count it
    small = arm.endswith("-80gib")
    if small:
        manifest["spec"]["memory"] = pinned_to_a_card(manifest, SMALL_CARD_BYTES)
    path = output.parent / f"{arm}.yaml"
    path.write_text(yaml.safe_dump(manifest))
    shutil.copy(Path(__file__).parent / "spread_rewards.py", path.parent)
    begun = time.perf_counter()
    with (
        ballast(leave_bytes=SMALL_CARD_BYTES) if small else nullcontext(),
        DevicePeak() as peak,
        tempfile.TemporaryDirectory() as caches,
    ):
        command: list[str | Path] = [sys.executable, "-m", "rljob_trainer", "run", path, "--output", output]
        message = run_steps(command, output, steps, variables_of(arm, Path(caches)))
    row = {"arm": arm, "message": message, "device_peak_bytes": peak.peak_bytes}
    return row | measured(output, time.perf_counter() - begun)


def variables_of(arm: str, caches: Path) -> dict[str, str]:
    """Environment variables of an arm. `caches`: an empty directory."""
    if arm.endswith("-padded"):
        return {ENABLED: "0"}
    return CompileCache(caches, caches, arm).variables() if arm.endswith("-cold") else {}


def run_steps(command: list[str | Path], output: Path, steps: int, variables: Mapping[str, str]) -> str:
    """Run a job and kill it after `steps` steps, since its last checkpoint would take up to 165 GiB of disk.

    `variables`: of its environment, besides those of this process.
    """
    job = subprocess.Popen(command, start_new_session=True, env=os.environ | variables)
    try:
        while job.poll() is None:
            if len(steps_of(output)) >= steps:
                return "all steps are committed"
            time.sleep(0.2)
        return f"exit code {job.returncode}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def steps_of(output: Path) -> list[dict[str, Any]]:
    return [line for line in ledger_of(output) if line["kind"] == "step"]


def ledger_of(output: Path) -> list[dict[str, Any]]:
    file = output / "ledger.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def manifest_of(arm: str, steps: int) -> dict[str, Any]:
    shape = arm.partition("-")[0]
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": f"bench-{arm.replace('.', '-')}"},
        "spec": {
            "model": {"uri": f"random://qwen3?{SHAPES[shape]}"},
            "task": {"name": "digits", "reward": "spread_rewards:spread"},
            "policy": {"optimizer": {"moments": moments_of(arm)}},
            "rollout": {"quantization": "Fp8PerTensor"} if arm == "8b-fp8" else {},
            "algorithm": {
                "steps": steps + 1,  # it is killed before the last, which would write a checkpoint
                "promptsPerStep": 2 if arm == "smoke" else 16,
                "groupSize": 4 if arm == "smoke" else 8,
                "maxPromptTokens": 16,
                "maxResponseTokens": response_tokens(shape),
                "ignoreEndOfSequence": True,
            },
            "checkpoint": {"everySteps": 1000},
        },
    }


def moments_of(arm: str) -> str:
    return {"14b": "bfloat16", "8b-bfloat16": "bfloat16", "8b-int8": "int8"}.get(arm, "float32")


def response_tokens(shape: str) -> int:
    return {"smoke": 8, "0.6b": 512}.get(shape, 1024)


def measured(output: Path, whole_seconds: float) -> dict[str, Any]:
    """The medians of the steps after the warm-up, or the message of a run without them."""
    lines, all_steps = ledger_of(output), steps_of(output)
    row: dict[str, Any] = {"whole_seconds": whole_seconds}
    if ready := [line["seconds"] for line in lines if line["kind"] == "ready"]:
        row |= {"start_up_seconds": sum(ready[0].values()), "start_up_by_part": ready[0]}
    if plans := [line["plan"] for line in lines if line["kind"] == "attempt"]:
        row["plan"] = plans[0]
    row["all_seconds"] = [step["total_seconds"] for step in all_steps]
    row["all_seconds_by_phase"] = [step["seconds"] for step in all_steps]
    steps = all_steps[WARM_UP_STEPS:]
    if not steps:
        return row
    return row | {
        "seconds_per_step": statistics.median(step["total_seconds"] for step in steps),
        "seconds_by_phase": {
            phase: statistics.median(step["seconds"][phase] for step in steps) for phase in steps[0]["seconds"]
        },
        "torch_peak_reserved_bytes": max(step["memory_bytes"]["policy-0"]["update"] for step in steps),
        "micro_batches": steps[-1]["metrics"]["micro_batches"],
        "grad_norms": [step["metrics"]["grad_norm"] for step in all_steps],
        "engine_against_policy": {
            name: [step["metrics"][name] for step in all_steps] for name in ENGINE_AGAINST_POLICY
        },
    }


def trl_arm(arm: str, steps: int) -> dict[str, Any]:
    shape = arm.partition("-")[0]
    model = resolve_model(f"random://qwen3?{SHAPES[shape]}")
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "bench.programs.trl_steps",
        model,
        "--steps",
        str(steps),
        *TRL_ARMS[arm],
    ]
    command += ["--response-tokens", str(response_tokens(shape))]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"arm": arm, "exit_code": done.returncode}
    return {"arm": arm, "exit_code": 0, **json.loads(done.stdout.splitlines()[-1])}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", choices=[*ARMS, []], metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--steps", type=int, default=6, help="steps of each arm, the warm-up included")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on any device; records nothing")
    parser.add_argument("--output", type=Path, default=Path("runs/large-models"), help="of the runs (replaced)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
