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

import os
from typing import Any

from bench.harness.run_arms import SECONDS, Arms, model_with_ends
from bench.harness.trl import COLOCATED, WITH_LIGER, trl_row
from rljob_testing.plan_accuracy.errors import Row
from rljob_testing.plan_accuracy.jobs import generating_job

PROMPTS, GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS, MEAN_TOKENS = 4, 16, 1000, 8000, 2000
STEPS, WARM_UP_STEPS = 4, 1


def spec_of(arm: str, steps: int, smoke: bool) -> dict[str, Any]:
    size = "smoke" if smoke else arm
    job = generating_job(size, steps, PROMPTS, RESPONSE_TOKENS, PROMPT_TOKENS, smoke=smoke)
    job["model"]["uri"] = f"file://{model_with_ends(size, 20 if smoke else MEAN_TOKENS)}"
    job["algorithm"] |= {"ignoreEndOfSequence": False, "groupSize": GROUP_SIZE}
    if smoke:
        job["algorithm"] |= {"maxResponseTokens": 80, "maxPromptTokens": 40}
    return job


def row_of_trl(steps: int) -> Row:
    options = {
        **COLOCATED,
        "model_name_or_path": str(model_with_ends("0.6b", MEAN_TOKENS)),
        "dtype": "float32",
        **WITH_LIGER,
        "per_device_train_batch_size": 2,  # the logits of four responses of this length do not fit
        "gradient_accumulation_steps": PROMPTS * GROUP_SIZE // 2,
        "num_generations": GROUP_SIZE,
        "max_completion_length": RESPONSE_TOKENS,
    }
    arguments = ["--steps", str(steps), "--warm-up-steps", str(WARM_UP_STEPS), "--prompt-tokens", str(PROMPT_TOKENS)]
    return trl_row(options, *arguments, "--own-ends", "--seconds", os.environ.get(SECONDS, "inf"))


if __name__ == "__main__":
    Arms(
        "mixed_lengths",
        spec_of,
        ["0.6b"],
        "Qwen3 shapes, random weights; a step: 64 responses of up to 8,000 tokens (mean 2,000), prompts of 1,000",
        steps=STEPS,
        warm_up_steps=WARM_UP_STEPS,
        others={"0.6b-trl": row_of_trl},
        smoke_names=["0.6b"],
    ).main(__doc__)
