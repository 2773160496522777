"""The update alone, without engine, Ray and the optimizer's step: seconds, and share of the GPU's peak arithmetic.

    python -m bench.programs.update_parts SIZE [--arms ARM...] [--rounds N] [--device cpu] [--output DIRECTORY]

128 responses of 1,024 random tokens (512 with 0.6b), in a shape of `plan_accuracy.jobs.SHAPES` with random weights.
Arms, alternating, each with what those before it have:
    before     autograd adds up gradients, FlashAttention 2, copies from memory that is not pinned, 8,192 tokens each
    copies     copies from pinned memory
    sums       gradients of matrices are added to their sums where they are computed
    attention  the attention kernel that the policy chooses
    16k        micro-batches of 16,384 tokens
After every update, writes `update_parts_SIZE.json` and in the first round a profile of each arm. `smoke` is for CPUs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from rljob_api.algorithm import AlgorithmSpec
from rljob_testing.memory_plans import memory_plan
from rljob_testing.plan_accuracy.jobs import SHAPES
from rljob_trainer.algorithm import gradient_sums
from rljob_trainer.algorithm.micro_batch import MicroBatch
from rljob_trainer.algorithms.functions import loss_function
from rljob_trainer.models import random_model
from rljob_trainer.policy import flash_attention_2, packed_attention, packed_kernel
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.gradients import Gradients
from rljob_trainer.policy.model import PolicyModel, compile_layers
from rljob_trainer.policy.update import PolicyUpdate
from rljob_trainer.policy.weight_loading import parameters_on_meta
from rljob_trainer.rollout_batch import RolloutBatch

PEAK_FLOPS = 989e12
"""bfloat16, dense, of an H100 or H200."""
ARMS = ("before", "copies", "sums", "attention", "16k")


def random_policy(shape: Any, device: torch.device) -> PolicyModel:
    fields_of_config = random_model._config(shape)
    config = AutoConfig.for_model(fields_of_config.pop("model_type"), **fields_of_config)
    on_gpu = device.type == "cuda"
    if on_gpu and not packed_attention._choose_kernel(shape.heads, shape.kv_heads, shape.head_dim):
        raise SystemExit("expected an attention kernel for packed sequences, found none that is right")
    packed_attention.register()
    with parameters_on_meta():
        causal_lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=packed_attention.NAME
        )
    causal_lm._apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each.to(device))
    causal_lm.tie_weights()
    with torch.no_grad():
        for parameter in causal_lm.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    model = PolicyModel(causal_lm.train(), temperature=1.0, chunk_tokens=1728, packs=True)
    gradient_sums.sum_matrices(model)
    if on_gpu:
        compile_layers(model.decoder_layers)
    return model


def random_batch(completions: int, tokens: int, vocabulary: int) -> RolloutBatch:
    draw, group_size = np.random.default_rng(0), 8
    return RolloutBatch(
        step=1,
        group_size=group_size,
        prompt_ids=[draw.integers(1, vocabulary, 16, np.int32) for _ in range(completions // group_size)],
        response_ids=[draw.integers(1, vocabulary, tokens, np.int32) for _ in range(completions)],
        rollout_logprobs=[np.full(tokens, -np.log(vocabulary), np.float32)] * completions,
        finished=np.ones(completions, np.bool_),
    ).scored(*draw.normal(size=(2, completions)).astype(np.float32))


def one_by_one(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    values = {field.name: getattr(micro_batch, field.name) for field in fields(micro_batch)}
    moved: Any = {name: each.to(device) for name, each in values.items() if isinstance(each, Tensor)}
    return replace(micro_batch, **moved)


class Plain:
    """Linear layers and embeddings as torch has them."""

    @staticmethod
    def apply(inputs: Tensor, weight: Tensor, option: Tensor | int | None) -> Tensor:
        if inputs.dtype == torch.int64:
            return functional.embedding(inputs, weight, padding_idx=cast("int | None", option))
        return functional.linear(inputs, weight, cast("Tensor | None", option))


@contextmanager
def as_arm(arm: str, update: PolicyUpdate) -> Iterator[None]:
    update.config = replace(update.config, memory=memory_plan(micro_batch_tokens=16_384 if arm == "16k" else 8192))
    with ExitStack() as changed:
        if ARMS.index(arm) < ARMS.index("copies"):
            changed.enter_context(mock.patch.object(MicroBatch, "to", one_by_one))
        if ARMS.index(arm) < ARMS.index("attention"):
            changed.enter_context(mock.patch.object(packed_kernel, "causal_kernel", flash_attention_2))
        if ARMS.index(arm) < ARMS.index("sums"):
            # Not their classes: the compiler would not notice.
            for name in ("_Linear", "_Embedding"):
                changed.enter_context(mock.patch.object(gradient_sums, name, Plain))
            changed.enter_context(mock.patch.object(Gradients, "added_up", return_value=nullcontext()))
        yield


def timed(update: PolicyUpdate, batch: RolloutBatch) -> tuple[float, dict[str, float]]:
    """Seconds of an update, which ends with the norm of the gradients on the host, and its metrics."""
    begun = time.perf_counter()
    metrics = update.run(batch)
    return time.perf_counter() - begun, metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SHAPES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=Path())
    options = parser.parse_args()
    device = torch.device(options.device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    shape = random_model.parse_query(f"qwen3?{SHAPES[options.size]}")
    model = random_policy(shape, device)
    algorithm, gradients = AlgorithmSpec(steps=1), Gradients(list(model.parameters()))
    config = PolicyConfig(Path(), Path(), options.device, "bfloat16", algorithm, memory_plan())
    loss = loss_function(algorithm, Path())
    no_step: Any = SimpleNamespace(gradients=gradients, learning_rate=0.0, step=lambda: None)
    update = PolicyUpdate(config, model, no_step, loss, None, device, lambda _: None)
    count, tokens = {"smoke": (16, 20), "0.6b": (128, 512)}.get(options.size, (128, 1024))
    batch, few = (random_batch(each, tokens, shape.vocabulary) for each in (count, 16))
    products = sum(each.numel() for each in model.parameters()) - (0 if shape.tied else shape.vocabulary * shape.hidden)
    attention = 7 * shape.layers * shape.heads * shape.head_dim * (tokens + 15) ** 2
    flops = count * (6 * products * (tokens + 15) + attention)
    result: dict[str, Any] = {"size": options.size, "kernel": packed_kernel.causal_kernel.__name__, "updates": []}
    seconds: dict[str, list[float]] = {arm: [] for arm in options.arms}
    for number, arm in [(number, arm) for number in range(options.rounds + 1) for arm in options.arms]:
        row: dict[str, Any] = {"arm": arm}
        with as_arm(arm, update):
            if number == 0:
                row["compiled_seconds"] = round(timed(update, few)[0], 1)
                if device.type == "cuda":
                    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as taken:
                        update.run(few)
                    table = taken.key_averages().table("self_cuda_time_total", 40, max_name_column_width=90)
                    (options.output / f"profile_{options.size}_{arm}.txt").write_text(table)
                    torch.cuda.reset_peak_memory_stats()
            else:
                each, metrics = timed(update, batch)
                seconds[arm].append(each)
                row["seconds"] = round(each, 3)
                row |= {name: metrics[name] for name in ("grad_norm", "micro_batches", "compilations")}
                if device.type == "cuda":
                    row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                    torch.cuda.reset_peak_memory_stats()
        result["updates"].append(row)
        measured = {name: median(each) for name, each in seconds.items() if each}
        result["median"] = {
            name: {"seconds": round(each, 3), "of_peak": round(flops / each / PEAK_FLOPS, 3)}
            for name, each in measured.items()
        }
        print(row, flush=True)
        (options.output / f"update_parts_{options.size}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
