"""GPU memory and seconds of TRL's GRPOTrainer against what `rljob plan --from trl` predicts from the same file.

    python -m bench.programs.trl_accuracy [CONFIGURATION...] [--seconds N] [--smoke]

Each configuration is a YAML file with TRL's options, of a model with random weights in a Qwen3 shape, colocated with
vLLM; `trl_steps` runs it for three steps, of which the first is not counted. They run at the same time, each on a GPU
of its own. Adds the rows to `trl_accuracy.json` in DIR. `--again`: predict the recorded configurations once more, as
after a change of the prediction; `plan_accuracy --page` writes them into docs/other-trainers.md. `--smoke`: a tiny
model without vLLM on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import yaml

from bench.harness.record import RESULTS, as_json, record_row, require_gpus, require_package
from bench.harness.trl import COLOCATED, measured_by, trl_command
from rljob_memory.hardware import type_of_product
from rljob_testing.plan_accuracy.errors import Row
from rljob_testing.plan_accuracy.jobs import SHAPES
from rljob_testing.plan_accuracy.schedule import GpuJob, run_jobs
from rljob_trainer.hardware import visible_gpus, visible_handles
from rljob_trainer.models.resolve import resolve_model

NAME = "trl_accuracy"
NOTE = "TRL's GRPOTrainer with vLLM on the same GPU, Qwen3 shapes, random weights, responses of the maximum length"
STEPS, SECONDS = 3, 150.0


def options(
    responses: int, tokens: int, micro_batch: int, share: float, *, sleeps: bool, checkpointing: bool, **others: Any
) -> dict[str, Any]:
    return COLOCATED | {
        "max_prompt_length": 16,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": responses // micro_batch,
        "max_completion_length": tokens,
        "vllm_gpu_memory_utilization": share,
        "vllm_enable_sleep_mode": sleeps,
        "gradient_checkpointing": checkpointing,
        **others,
    }


CONFIGURATIONS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "0.6b-float32": ("0.6b", options(128, 512, 16, 0.3, sleeps=True, checkpointing=False, dtype="float32")),
    "0.6b-kl-awake": ("0.6b", options(64, 1024, 32, 0.25, sleeps=False, checkpointing=True, beta=0.04)),
    "1.7b-float32": ("1.7b", options(64, 1024, 8, 0.3, sleeps=True, checkpointing=True, dtype="float32")),
    "4b": ("4b", options(32, 512, 8, 0.3, sleeps=True, checkpointing=True)),
    "4b-lora": (
        "4b",
        options(32, 512, 4, 0.3, sleeps=False, checkpointing=False, dtype="bfloat16", use_peft=True, lora_r=16),
    ),
}

SMOKE: dict[str, Any] = options(16, 16, 8, 0.3, sleeps=False, checkpointing=True) | {
    "num_generations": 4,
    "dtype": "float32",
    "bf16": False,
    "use_cpu": True,
    "use_vllm": False,
}


def uri_of(size: str) -> str:
    return f"random://qwen3?{SHAPES[size]}"


def row_of(name: str, directory: Path, gpu: str, gpus: Sequence[Any], most_seconds: float) -> Row:
    """Predict and run one configuration on a GPU (a handle of NVML; none in a smoke run)."""
    size, given = CONFIGURATIONS.get(name, ("smoke", SMOKE))
    config = directory / f"{name}.yaml"
    directory.mkdir(parents=True, exist_ok=True)
    options_of_model = {"model_name_or_path": str(resolve_model(uri_of(size)))} | dict(given)
    command = trl_command(config, options_of_model, "--steps", str(STEPS), "--warm-up-steps", "1")
    environment = dict(os.environ)
    if gpus:
        number = pynvml.nvmlDeviceGetIndex(gpus[0])
        environment |= {"CUDA_VISIBLE_DEVICES": str(number), "MASTER_PORT": str(29_600 + number)}
    with (directory / f"{name}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            command,
            check=False,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=most_seconds if gpus else None,
        )
        log.write(done.stdout)
    predicted = plan_of(size if gpus else "0.6b", given, gpu)
    row = {"arm": name, "gpu": gpu, "options": dict(given), "exit_code": done.returncode, "predicted": predicted}
    return row | {"measured": measured_by(done)}


def plan_of(size: str, given: Mapping[str, Any], gpu: str) -> dict[str, Any]:
    """The report of `rljob plan --from trl` on the options, with a model of this size, on one such GPU."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "trl.yaml"
        config.write_text(yaml.safe_dump({"model_name_or_path": f"Qwen/Qwen3-{size.upper()}"} | dict(given)))
        command = [sys.executable, "-m", "rljob_client", "plan", str(config), "--from", "trl", "--gpu", gpu, "--json"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        return {"error": done.stderr}
    found = json.loads(done.stdout)
    gpu_peaks = found["peakBytes"]["gpu"]["policy"]
    return {
        "verdict": found["verdict"],
        "plan": found["plan"],
        "phases": {phase: {"gpu": gpu_peaks[phase], "seconds": found["seconds"][phase]} for phase in found["seconds"]},
    }


def predict_again(path: Path) -> None:
    """Replace the predictions of a result, which the machine that measured it has written."""
    result = json.loads(path.read_text())
    for row in result["rows"]:
        gpu = row.get("gpu") or type_of_product(result["device"]) or "h100"
        row["predicted"] = plan_of(row["arm"].partition("-")[0], row["options"], gpu)
    path.write_text(as_json(result) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="*", choices=[*CONFIGURATIONS, []], metavar="CONFIGURATION")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after this time, with the rows until then")
    parser.add_argument("--runs", type=Path, default=Path("runs") / NAME, help="directory of configurations and logs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the JSON")
    parser.add_argument("--again", action="store_true", help="only predict the recorded configurations again")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU; records nothing")
    given = parser.parse_args()
    if given.again:
        predict_again(given.output / f"{NAME}.json")
        return
    require_package("trl")
    if given.smoke:
        with tempfile.TemporaryDirectory() as folder:
            row = row_of("smoke", Path(folder), "h100", [], math.inf)
            print(json.dumps(row, indent=2))
            assert row["measured"]["phases"]["update"]["seconds"] > 0
        return
    require_gpus(1)
    pynvml.nvmlInit()
    gpu = type_of_product(visible_gpus()[0].name) or "h100"
    names = given.configurations or list(CONFIGURATIONS)
    jobs = [GpuJob(n, uri_of(CONFIGURATIONS[n][0]), 1, SECONDS, partial(row_of, n, given.runs, gpu)) for n in names]

    def add(_job: GpuJob, row: Row) -> None:
        print(json.dumps(row), flush=True)
        record_row(NAME, row, "arm", NOTE, given.output)

    for job in run_jobs(jobs, visible_handles(), given.seconds, resolve_model, add):
        print(f"{job.name} was not started: {job.seconds:.0f} s are not left")


if __name__ == "__main__":
    main()
