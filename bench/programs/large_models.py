"""Full fine-tuning of large models on one GPU: seconds by phase and peak GPU memory, RLJob, TRL and verl.

    python -m bench.programs.large_models [ARM...] [--steps N] [--smoke]

Arms (Qwen3's shapes, random weights in bfloat16, 16 prompts × 8 responses of 1,024 tokens a step, or 512 with 0.6B):
    0.6b           the optimizer's state on the GPU
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
    0.6b-trl-liger, 8b-trl-liger    with Liger's kernels for layers, and without checkpointing
    8b-verl-liger  verl 0.9.1, colocated with vLLM, float32 weights with gradient checkpointing and Liger's kernels; the
                   optimizer's state is on the GPU in updates only, since the sync needs a copy of the weights

Records one row for each arm in `bench/results/large_models.json`, after those that it already has. The first two steps
are not counted. `--smoke`: a tiny model on any device; records nothing. The environment variable BENCH_SECONDS ends the
arm of verl, with the steps until then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from bench.harness.run_arms import SECONDS, Arms
from bench.harness.trl import COLOCATED, WITH_LIGER, trl_row
from bench.harness.verl import ACTOR, MODEL, ROLLOUT, Batch, verl_row
from rljob_memory.sizes import GIB
from rljob_testing.plan_accuracy.errors import Row
from rljob_testing.plan_accuracy.jobs import GROUP_SIZE, SHAPES, generating_job
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.pods.compile_cache import CompileCache
from rljob_trainer.policy.packed_attention import ENABLED

OF_8B = ("8b", "8b-padded", "8b-bfloat16", "8b-int8", "8b-fp8", "8b-cold", "8b-warm", "8b-80gib")
TRL_ARMS: dict[str, dict[str, Any]] = {
    "0.6b-trl": {"dtype": "float32", "gradient_checkpointing": False, "per_device_train_batch_size": 16},
    "8b-trl": {"dtype": "bfloat16", "gradient_checkpointing": True, "per_device_train_batch_size": 8},
    "8b-trl-float32": {"dtype": "float32", "gradient_checkpointing": True, "per_device_train_batch_size": 8},
    "0.6b-trl-liger": {"dtype": "float32", "per_device_train_batch_size": 32, **WITH_LIGER},
    "8b-trl-liger": {"dtype": "bfloat16", "per_device_train_batch_size": 8, **WITH_LIGER},
}
VERL: dict[str, Any] = {
    # Rollout correction's bypass mode: the engine's log-probabilities are those of the old policy.
    "algorithm.rollout_correction.bypass_mode": True,
    # With the strategy fsdp2, these kernels fail for models with an output layer of its own.
    f"{MODEL}.use_fused_kernels": True,
    f"{ACTOR}.strategy": "fsdp",
    # AdamW's default has temporary values as large as the weights.
    f"{ACTOR}.optim.override_optimizer_config": "{fused:True}",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8,
    f"{ROLLOUT}.gpu_memory_utilization": 0.4,
    f"{ROLLOUT}.max_num_seqs": 128,
    f"{ROLLOUT}.cudagraph_capture_sizes": "[1,8,16,32,64,96,128]",
    f"{ROLLOUT}.agent.num_workers": 2,
    f"{ACTOR}.fsdp_config.optimizer_offload": True,
    f"{MODEL}.use_liger": True,
}
MOMENTS = {"14b": "bfloat16", "8b-bfloat16": "bfloat16", "8b-int8": "int8"}
SMALL_CARD_BYTES = 79 * GIB
"""Memory that CUDA reports for an H100 of 80 GB."""


def spec_of(arm: str, steps: int, smoke: bool) -> dict[str, Any]:
    model = arm.partition("-")[0]
    job = generating_job(model, steps, 16, response_tokens(model), smoke=smoke)
    rollout = {"quantization": "Fp8PerTensor"} if arm == "8b-fp8" and not smoke else {}
    return job | {"policy": {"optimizer": {"moments": MOMENTS.get(arm, "float32")}}, "rollout": rollout}


def response_tokens(model: str) -> int:
    return 512 if model == "0.6b" else 1024


def variables_of(arm: str) -> Mapping[str, str]:
    if arm.endswith("-padded"):
        return {ENABLED: "0"}
    empty = Path(mkdtemp()) if arm.endswith("-cold") else None
    return CompileCache(empty, empty, arm).variables() if empty else {}


def row_of_trl(arm: str, steps: int) -> Row:
    model = arm.partition("-")[0]
    chosen = TRL_ARMS[arm]
    options = {
        "model_name_or_path": str(resolve_model(f"random://qwen3?{SHAPES[model]}")),
        "gradient_accumulation_steps": 128 // chosen["per_device_train_batch_size"],
        "max_completion_length": response_tokens(model),
    }
    given_up = ["--given-up-on-memory"] if arm == "8b-trl-float32" else []
    return trl_row(COLOCATED | options | chosen, "--steps", str(steps), *given_up)


def row_of_verl(steps: int) -> Row:
    model = resolve_model(f"random://qwen3?{SHAPES['8b']}")
    return verl_row(model, Batch(16, GROUP_SIZE, 1024), VERL, steps, float(os.environ.get(SECONDS, "inf")))


ARMS = Arms(
    "large_models",
    spec_of,
    ["0.6b", "4b", *OF_8B, "14b"],
    "Qwen3 shapes, random weights, all weights trained, 128 responses of 1,024 tokens a step (0.6b: 512)",
    steps=6,
    warm_up_steps=2,
    card_bytes=lambda arm: SMALL_CARD_BYTES if arm == "8b-80gib" else None,
    variables=variables_of,
    others={**{arm: partial(row_of_trl, arm) for arm in TRL_ARMS}, "8b-verl-liger": row_of_verl},
    smoke_names=["0.6b"],
)

if __name__ == "__main__":
    ARMS.main(__doc__)
