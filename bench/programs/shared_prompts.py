"""Seconds of an update where responses share the computation of their prompt, and where each repeats it.

    python -m bench.programs.shared_prompts [--model SIZE] [--rounds N] [--smoke] [--results DIRECTORY]

The policy alone, in one process: Qwen3's shape, random weights, 8 groups of 16 responses of 250 to 750 tokens, with
prompts of 1,000 tokens, and of 120, where sharing saves less than it must. Both arms alternate, on the same
batch, after one round that is not counted. Records a row for each length of the prompts in
`bench/results/shared_prompts.json`, with the difference of log-probabilities and gradients between the arms. `--smoke`:
a tiny model on any device; records nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bench.harness.record import RESULTS, record_row, require_gpus
from rljob_api.algorithm import AlgorithmSpec
from rljob_testing.memory_plans import memory_plan
from rljob_testing.plan_accuracy.jobs import SHAPES
from rljob_trainer.algorithm.micro_batch import completions_with_tokens
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.rollout_batch import RolloutBatch

ARMS = {"repeated": False, "shared": True}
GROUPS, GROUP_SIZE = 8, 16


def main(given: argparse.Namespace) -> None:
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    size, scale = ("smoke", 20) if given.smoke else (given.model, 1)
    if not given.smoke:
        require_gpus(1)
    config = PolicyConfig(
        model_dir=resolve_model(f"random://qwen3?{SHAPES[size]}"),
        output_dir=Path(mkdtemp()),
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        algorithm=AlgorithmSpec(steps=100, learning_rate=1e-6),
        memory=memory_plan(micro_batch_tokens=16_384 // scale, logprob_chunk_tokens=2048),
    )
    policy = PolicyRank(0, 1, config)
    policy.connect(*policy.rendezvous())
    policy.load()
    print("packs", policy._model.packs, "shares prompts", policy._model.shares_prompts, flush=True)
    for prompt_tokens in (1000, 120):
        batch = batch_of(prompt_tokens // scale, 500 // scale)
        row = {"model": size, "prompt_tokens": prompt_tokens, **compared(policy, batch, given.rounds)}
        print(json.dumps(row), flush=True)
        if not given.smoke:
            note = "Qwen3 shapes, random weights, 8 × 16 responses of 250 to 750 tokens, 16,384 tokens a micro-batch"
            record_row("shared_prompts", {"arm": f"{size}-{prompt_tokens}", **row}, "arm", note, given.results)


def batch_of(prompt_tokens: int, mean_tokens: int) -> RolloutBatch:
    draw = np.random.default_rng(0)
    lengths = draw.integers(mean_tokens // 2, mean_tokens * 3 // 2, GROUPS * GROUP_SIZE)
    return RolloutBatch(
        step=1,
        group_size=GROUP_SIZE,
        prompt_ids=[draw.integers(3, 60, prompt_tokens).astype(np.int32) for _ in range(GROUPS)],
        response_ids=[draw.integers(3, 60, length).astype(np.int32) for length in lengths],
        rollout_logprobs=[np.full(length, -12.0, np.float32) for length in lengths],
        finished=np.ones(len(lengths), np.bool_),
    ).scored(*draw.normal(size=(2, len(lengths))).astype(np.float32))


def compared(policy: PolicyRank, batch: RolloutBatch, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    found = {}
    for arm, shared in ARMS.items():
        policy._model.shares_prompts = shared
        found[arm] = logprobs_and_gradients(policy, batch, row, arm)
    (logprobs, grads), (others, other_grads) = found.values()
    row["logprob_diff_max"] = float((logprobs - others).abs().max())
    row["gradient_difference"] = float((grads - other_grads).norm() / grads.norm())
    del found, grads, other_grads
    for _ in range(rounds + 1):
        for arm, shared in ARMS.items():
            policy._model.shares_prompts = shared
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            policy.update(batch)
            seconds[arm].append(time.perf_counter() - begun)
            if torch.cuda.is_available():
                row[f"{arm}_peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
            print(arm, round(seconds[arm][-1], 3), flush=True)
    for arm, all_seconds in seconds.items():
        row |= {f"{arm}_seconds": statistics.median(all_seconds[1:]), f"{arm}_all_seconds": all_seconds}
    return row


def logprobs_and_gradients(
    policy: PolicyRank, batch: RolloutBatch, row: dict[str, Any], arm: str
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all response tokens, in the order of the batch, and all gradients; both on the host."""
    update, completions = policy._loaded.update, completions_with_tokens(batch)
    micro_batches = list(update.micro_batches(batch, completions, completions))
    row |= {f"{arm}_tokens": sum(part.input_ids.numel() for part in micro_batches)}
    row |= {f"{arm}_micro_batches": len(micro_batches)}
    logprobs: dict[int, Tensor] = {}
    for part, values in zip(micro_batches, update.logprobs(micro_batches), strict=True):
        logprobs |= zip(part.completions, values.cpu().split(part.response_lengths), strict=True)
        update._backward(part, None)
    grads = torch.cat([grad.cpu() for grad in policy._optimizer.gradients.all()])
    policy._optimizer.gradients.clear()
    return torch.cat([logprobs[completion] for completion in completions]), grads


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6b", choices=[*SHAPES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a tiny model; records nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    main(parser.parse_args())
