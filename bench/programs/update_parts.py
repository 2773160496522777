"""The update alone, without engine, Ray and the optimizer's step: seconds, share of the GPU's peak, and time of its parts.

    python -m bench.programs.update_parts SIZE [--arms ARM...] [--rounds N] [--completions N] [--alone] [--output DIRECTORY]

SIZE: a shape of `plan_accuracy.jobs.SHAPES`, with random weights that no file holds. The step is 128 responses of 1,024
random tokens to 16 prompts (512 with 0.6b). Arms, one after the other in each round, after one round that compiles:
    before     autograd's sums of gradients, FlashAttention 2, and a copy for each tensor of a micro-batch
    copies     one copy for all tensors of a micro-batch
    sums       and matrices whose gradients are added to their sums where they are computed
    attention  and the attention kernel that the policy chooses
    16k        and micro-batches of 16,384 tokens instead of 8,192
`--alone`: first, the attention kernels and the sum of one gradient alone. Writes `update_parts_SIZE.json` and a profile of
each arm to DIRECTORY after every round. `--device cpu`: a small model in bfloat16, to try the program.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rljob_api.algorithm import AlgorithmSpec
from rljob_testing.memory_plans import memory_plan
from rljob_testing.plan_accuracy.jobs import SHAPES
from rljob_trainer.algorithm import gradient_sums
from rljob_trainer.algorithm.micro_batch import MicroBatch
from rljob_trainer.algorithms.functions import loss_function
from rljob_trainer.models.random_model import parse_query
from rljob_trainer.policy import packed_attention
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.gradients import Gradients
from rljob_trainer.policy.model import PolicyModel, compile_layers
from rljob_trainer.policy.update import PolicyUpdate
from rljob_trainer.policy.weight_loading import parameters_on_meta
from rljob_trainer.rollout_batch import RolloutBatch

PEAK_FLOPS = 989e12
"""bfloat16, dense, of an H100 or H200."""
ARMS = ("before", "copies", "sums", "attention", "16k")
PARTS = {
    "attention": r"flash|fmha|FlashAttention|attention",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitK",
    "copies": r"Memcpy|Memset",
    "other kernels": r"",
}
"""Parts of a profile by the first expression that a kernel's name contains."""


@dataclass
class NoStep:
    """An optimizer that only has gradients."""

    gradients: Gradients
    learning_rate: float = 0.0

    def step(self) -> None:
        pass


def random_policy(size: str, device: torch.device) -> tuple[PolicyModel, Any]:
    shape = parse_query(f"qwen3?{SHAPES[size]}")
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )
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
    model = PolicyModel(causal_lm.train(), temperature=1.0, chunk_tokens=2048, packs=True)
    gradient_sums.sum_matrices(model)
    if device.type == "cuda":
        if not packed_attention._choose_kernel(shape.heads, shape.kv_heads, shape.head_dim):
            raise SystemExit("expected an attention kernel for packed sequences, found none that is right")
        compile_layers(model.decoder_layers)
    return model, shape


def random_batch(completions: int, tokens: int, vocabulary: int) -> RolloutBatch:
    draw, group_size = np.random.default_rng(0), 8
    return RolloutBatch(
        step=1,
        group_size=group_size,
        prompt_ids=[draw.integers(1, vocabulary, 16, np.int32) for _ in range(completions // group_size)],
        response_ids=[draw.integers(1, vocabulary, tokens, np.int32) for _ in range(completions)],
        rollout_logprobs=[np.full(tokens, -np.log(vocabulary), np.float32) for _ in range(completions)],
        finished=np.ones(completions, np.bool_),
    ).scored(*draw.normal(size=(2, completions)).astype(np.float32))


def one_by_one(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    values = {field.name: getattr(micro_batch, field.name) for field in fields(micro_batch)}
    return replace(micro_batch, **{name: each.to(device) for name, each in values.items() if isinstance(each, Tensor)})


@contextmanager
def as_arm(arm: str, update: PolicyUpdate) -> Iterator[None]:
    """The policy with the parts of `arm`, and of those before it."""
    level = ARMS.index(arm)
    update.config = replace(update.config, memory=memory_plan(micro_batch_tokens=16_384 if arm == "16k" else 8192))
    with ExitStack() as changed:
        if level < ARMS.index("copies"):
            changed.enter_context(mock.patch.object(MicroBatch, "to", one_by_one))
        if level < ARMS.index("attention"):
            changed.enter_context(mock.patch.object(packed_attention, "_kernel", packed_attention._by_torch))
        if level < ARMS.index("sums"):
            for plain, summed in gradient_sums._SUMMED.items():
                for module in update.model.modules():
                    if type(module) is summed:
                        module.__class__ = plain
            changed.callback(gradient_sums.sum_matrices, update.model)
            changed.enter_context(mock.patch.object(Gradients, "added_up", lambda _self: nullcontext()))
        yield


def seconds_of(work: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - begun) / repeats


def profile_of(work: Callable[[], Any], table: Path) -> dict[str, float]:
    """Seconds of the GPU by part, and a table of the kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as taken:
        work()
    events = taken.key_averages()
    table.write_text(events.table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90))
    parts: dict[str, float] = defaultdict(float)
    for event in events:
        part = next(part for part, pattern in PARTS.items() if re.search(pattern, event.key, re.IGNORECASE))
        parts[part] += event.self_device_time_total / 1e6
    return {part: round(seconds, 3) for part, seconds in parts.items()}


def attention_alone(shape: Any, device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for lengths in ([1040] * 8, [16_384]):
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        given = [
            torch.randn(sum(lengths), each, shape.head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
            for each in heads
        ]
        bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
        grad = torch.randn_like(given[0])
        for kernel in (packed_attention._by_torch, packed_attention._by_flash_attention_4):

            def both(kernel: Any = kernel, given: Any = given, bounds: Any = bounds, grad: Any = grad) -> None:
                output = kernel(*given, bounds, 1 << (max(lengths) - 1).bit_length(), None, None)
                torch.autograd.grad(output, given, grad)

            row: dict[str, Any] = {"kernel": kernel.__name__, "lengths": f"{len(lengths)} × {lengths[0]}"}
            try:
                row["first_seconds"] = round(seconds_of(both, device), 2)
                row["seconds"] = round(seconds_of(both, device, 20), 6)
                flops = 7 * shape.heads * shape.head_dim * sum(length**2 for length in lengths)
                row["tflops"] = round(flops / row["seconds"] / 1e12)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            rows.append(row)
    return rows


def sums_alone(shape: Any, device: torch.device) -> list[dict[str, Any]]:
    """One gradient of the largest matrix of a layer, and its addition to a float32 sum."""
    rows = []
    for tokens in (8192, 16_384):
        grad = torch.randn(tokens, shape.intermediate_size, device=device, dtype=torch.bfloat16)
        hidden = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16)
        total = torch.zeros(shape.intermediate_size, shape.hidden, device=device)
        ways = {
            "product alone": lambda grad=grad, hidden=hidden: grad.T @ hidden,
            "product, then add": lambda grad=grad, hidden=hidden, total=total: total.add_(grad.T @ hidden),
            "added by the product": lambda grad=grad, hidden=hidden, total=total: torch.addmm(
                total, grad.T, hidden, out_dtype=torch.float32, out=total
            ),
            "float32 product, then add": lambda grad=grad, hidden=hidden, total=total: total.add_(
                torch.mm(grad.T, hidden, out_dtype=torch.float32)
            ),
        }
        for way, work in ways.items():
            row: dict[str, Any] = {"way": way, "tokens": tokens}
            try:
                seconds_of(work, device, 3)
                row["seconds"] = round(seconds_of(work, device, 20), 6)
            except RuntimeError as error:
                row["error"] = str(error)[:300]
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SHAPES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--completions", type=int, default=128)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--alone", action="store_true", help="also measure kernels alone")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=Path())
    options = parser.parse_args()
    device, begun = torch.device(options.device), time.perf_counter()
    result: dict[str, Any] = {"size": options.size, "torch": torch.__version__, "attempts": []}
    if device.type == "cuda":
        result["device"] = torch.cuda.get_device_name()

    def say(what: object) -> None:
        print(f"[{time.perf_counter() - begun:.0f} s] {what}", flush=True)
        (options.output / f"update_parts_{options.size}.json").write_text(json.dumps(result, indent=1) + "\n")

    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, shape = random_policy(options.size, device)
    say(f"{sum(each.numel() for each in model.parameters()) / 1e9:.2f} × 10⁹ parameters")
    result["kernel"] = packed_attention._kernel.__name__
    if device.type == "cuda":
        for name, measure in (("attention", attention_alone), ("sums", sums_alone)):
            if options.alone:
                result[name] = measure(shape, device)
                say(result[name])
    algorithm = AlgorithmSpec(steps=1)
    config = PolicyConfig(Path(), Path(), options.device, "bfloat16", algorithm, memory_plan())
    gradients = Gradients(list(model.parameters()))
    update = PolicyUpdate(
        config, model, NoStep(gradients), loss_function(algorithm, Path()), None, device, lambda _: None  # type: ignore[arg-type]
    )
    tokens = options.tokens or (512 if options.size == "0.6b" else 1024)
    batch, few = (random_batch(count, tokens, shape.vocabulary) for count in (options.completions, 16))
    products = sum(each.numel() for each in model.parameters()) - (0 if shape.tied else shape.vocabulary * shape.hidden)
    flops = options.completions * (
        6 * products * (tokens + 15) + 7 * shape.layers * shape.heads * shape.head_dim * (tokens + 15) ** 2
    )
    for arm in options.arms:
        with as_arm(arm, update):
            say(f"{arm} compiled in {seconds_of(partial(update.run, few), device):.1f} s")
    seconds: dict[str, list[float]] = {arm: [] for arm in options.arms}
    for number in range(options.rounds):
        for arm in options.arms:
            with as_arm(arm, update):
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                metrics: dict[str, float] = {}
                seconds[arm].append(seconds_of(lambda: metrics.update(update.run(batch)), device))
                row = {"arm": arm, "seconds": round(seconds[arm][-1], 3), "grad_norm": metrics["grad_norm"]}
                row |= {name: metrics[name] for name in ("micro_batches", "compilations")}
                if device.type == "cuda":
                    row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                    if number == 0:
                        row["profiled"] = profile_of(partial(update.run, few), options.output / f"profile_{arm}.txt")
                result["attempts"].append(row)
                result["median"] = {
                    arm: {"seconds": round(median(each), 3), "of_peak": round(flops / median(each) / PEAK_FLOPS, 3)}
                    for arm, each in seconds.items()
                    if each
                }
                say(row)


if __name__ == "__main__":
    main()
