"""Responses of mixed lengths to long prompts on one GPU: seconds by phase, RLJob and TRL.

    python -m bench.programs.mixed_lengths [ARM...] [--steps N] [--smoke]

Arms (Qwen3's shapes, random weights in bfloat16, 4 prompts of 1,000 tokens × 16 responses of up to 8,000 a step):
    0.6b       RLJob, where the memory plan decides
    0.6b-trl   TRL's GRPOTrainer, colocated with vLLM, float32 weights

Each response ends by itself: one token of 2,000 in the vocabulary ends a sequence, as the model's
`generation_config.json` says, which vLLM and TRL read. Random weights draw nearly all tokens with equal probability, so
lengths are distributed geometrically, with a mean of 2,000 before the limit (5, 50 and 95 %: 100, 1,400, 6,000). A row
has the quantiles of the lengths that were drawn. Records one row for each arm in `bench/results/mixed_lengths.json`,
after those that it already has. The first step is not counted. `--smoke`: a tiny model on any device; records nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml

from bench.harness.record import require_package
from bench.harness.run_arms import Arms
from bench.programs.large_models import WITH_LIGER
from rljob_testing.plan_accuracy.errors import Row
from rljob_testing.plan_accuracy.jobs import SHAPES, generating_job
from rljob_trainer.models.resolve import resolve_model

PROMPTS, GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS, MEAN_TOKENS = 4, 16, 1000, 8000, 2000
STEPS, WARM_UP_STEPS = 4, 1
SECONDS = "BENCH_SECONDS"
"""Environment variable. TRL begins no step that would end later after its start."""


def model_with_ends(size: str, mean_tokens: int) -> Path:
    """A model in Qwen3's shape of which one token in `mean_tokens` ends a sequence."""
    source = resolve_model(f"random://qwen3?{SHAPES[size]}")
    config = json.loads((source / "config.json").read_text())
    ends = [config["eos_token_id"], *range(mean_tokens, config["vocab_size"], mean_tokens)]
    directory = source.with_name(f"{source.name}-ends-{mean_tokens}")
    if not directory.exists():
        shutil.copytree(source, directory, copy_function=os.link)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return directory


def spec_of(arm: str, steps: int, smoke: bool) -> dict[str, Any]:
    size = "smoke" if smoke else arm
    job = generating_job(size, steps, PROMPTS, RESPONSE_TOKENS, PROMPT_TOKENS, smoke=smoke)
    job["model"]["uri"] = f"file://{model_with_ends(size, 20 if smoke else MEAN_TOKENS)}"
    job["algorithm"] |= {"ignoreEndOfSequence": False, "groupSize": GROUP_SIZE}
    if smoke:
        job["algorithm"] |= {"maxResponseTokens": 80, "maxPromptTokens": 40}
    return job


def trl_row(steps: int) -> Row:
    require_package("trl")
    require_package("liger_kernel")
    options = {
        "model_name_or_path": str(model_with_ends("0.6b", MEAN_TOKENS)),
        "dtype": "float32",
        **WITH_LIGER,
        "per_device_train_batch_size": 2,  # the logits of four responses of this length do not fit
        "gradient_accumulation_steps": PROMPTS * GROUP_SIZE // 2,
        "num_generations": GROUP_SIZE,
        "max_completion_length": RESPONSE_TOKENS,
        "bf16": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
    }
    config = Path(mkdtemp()) / "trl.yaml"
    config.write_text(yaml.safe_dump(options))
    command = [sys.executable, "-m", "bench.programs.trl_steps", str(config), "--steps", str(steps), "--own-ends"]
    command += ["--prompt-tokens", str(PROMPT_TOKENS), "--warm-up-steps", str(WARM_UP_STEPS)]
    command += ["--seconds", os.environ.get(SECONDS, "inf")]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    measured = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    return {"exit_code": done.returncode, **measured}


if __name__ == "__main__":
    Arms(
        "mixed_lengths",
        spec_of,
        ["0.6b"],
        "Qwen3 shapes, random weights; a step: 64 responses of up to 8,000 tokens (mean 2,000), prompts of 1,000",
        steps=STEPS,
        warm_up_steps=WARM_UP_STEPS,
        others={"0.6b-trl": trl_row},
        smoke_names=["0.6b"],
    ).main(__doc__)
