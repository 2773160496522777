"""A training loop under the probe that measures the probe's cost and prints it as one line of JSON.

    PYTHONPATH=probe/rljob_probe/site python -m bench.harness.probed_training

`bench.programs.probe_overhead --device cuda` starts it. A Qwen3 of 0.47 billion random parameters in bfloat16 takes
steps of eight micro-batches with AdamW, so that the caching allocator holds the blocks of a real training.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from bench.harness.probe_cost import (
    idle_hook_seconds,
    probe_calls,
    probe_hooks,
    sample_seconds,
    step_percent,
    summary,
    timed_hooks,
)

SHAPE = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
MICRO_BATCHES, SEQUENCES, TOKENS = 8, 8, 1024
WARM_UP_STEPS, TIMED_STEPS, COUNTED_STEPS = 3, 20, 5
SAMPLES, QUEUED_SAMPLES, HOOK_BATCHES = 1000, 100, 200
QUEUED_PRODUCTS, QUEUED_ROWS = 300, 8192
"""Matrix products that keep an H200 busy for about half a second."""


def main() -> None:
    import torch

    step, parameters = training()
    step_memory = sys.modules["rljob_probe.step_memory"]  # the probe imported it with torch
    for _ in range(WARM_UP_STEPS):
        step()
    row = measured(step, step_memory, torch)
    row["queued"] = queued(step_memory, torch)
    stats = torch.cuda.memory_stats()
    row |= {
        "parameter_tensors": parameters,
        "allocated_blocks": stats["allocation.all.current"],
        "allocated_bytes": stats["allocated_bytes.all.current"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
    }
    row["step_percent"] = largest_share(row)
    print(json.dumps(row))


def training(device: str = "cuda") -> tuple[Callable[[], None], int]:
    """A step of training that waits for its end, and the number of parameter tensors."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(SHAPE["vocab_size"], (MICRO_BATCHES, SEQUENCES, TOKENS), device=device)

    def step() -> None:
        for batch in tokens:
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    return step, len(list(model.parameters()))


def measured(
    step: Callable[[], object],
    step_memory: Any,
    torch: ModuleType,
    steps: int = TIMED_STEPS,
    samples: int = SAMPLES,
) -> dict[str, Any]:
    """Steps, samples in these steps and alone, hooks, and calls into the probe."""
    optimizers = sys.modules["torch.optim.optimizer"]  # torch.optim has no attribute of this name
    before, after = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    hooks = [*probe_hooks(before).values(), *probe_hooks(after).values()]
    if len(hooks) != 2:
        raise RuntimeError(f"expected 2 hooks of the probe, found {len(hooks)}; start this process under the probe")
    step_seconds = []
    with timed_hooks(after) as in_steps:
        for _ in range(steps):
            step_memory._taken_at = float("-inf")
            begun = time.perf_counter()
            step()
            step_seconds.append(time.perf_counter() - begun)
    return {
        "interval_seconds": step_memory.SECONDS_BETWEEN_SAMPLES,
        "step_seconds": statistics.median(step_seconds),
        "sample_in_step_seconds": summary(in_steps),
        "sample_seconds": summary(sample_seconds(step_memory, torch, samples)),
        "idle_hook_seconds": idle_hook_seconds(step_memory, torch, hooks, HOOK_BATCHES),
        "counted_steps": COUNTED_STEPS,
        "probe_calls": probe_calls(step, COUNTED_STEPS),
    }


def queued(step_memory: Any, torch: ModuleType) -> dict[str, Any]:
    """Samples while the GPU has work queued. `remaining_seconds`: from the last sample to the end of this work. It is
    near zero if a sample waits for the GPU."""
    matrix = torch.randn(QUEUED_ROWS, QUEUED_ROWS, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    torch.matmul(matrix, matrix, out=product)
    torch.cuda.synchronize()
    for _ in range(QUEUED_PRODUCTS):
        torch.matmul(matrix, matrix, out=product)
    done = torch.cuda.Event()
    done.record()
    seconds = sample_seconds(step_memory, torch, QUEUED_SAMPLES, warm_up=0)
    is_pending = not done.query()
    begun = time.perf_counter()
    torch.cuda.synchronize()
    return {
        "sample_seconds": summary(seconds),
        "is_pending_after": is_pending,
        "remaining_seconds": time.perf_counter() - begun,
    }


def largest_share(row: dict[str, Any]) -> float:
    """Percent of a step, with the slowest of the three medians of a sample."""
    kinds = (row["sample_seconds"], row["sample_in_step_seconds"], row["queued"]["sample_seconds"])
    slowest: float = max(kind["median"] for kind in kinds)
    return step_percent(slowest, row["idle_hook_seconds"], row["step_seconds"], row["interval_seconds"])


if __name__ == "__main__":
    main()
