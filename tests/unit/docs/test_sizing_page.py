"""The tables of docs/sizing.md and docs/topologies.md are what the planner calculates."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_api.memory_plan import MemorySettings
from rljob_memory.estimate import (
    OPTIMIZER_STEP_BYTES,
    POLICY_BESIDE_TORCH_BYTES,
    activation_bytes_per_token,
    awake_engine_bytes,
    engine_weight_bytes,
    kv_bytes,
    policy_state_bytes,
    policy_update_bytes,
    policy_weight_bytes,
    sleeping_engine_bytes,
    weight_sync_bytes,
)
from rljob_memory.plan import Hardware, MemoryPlan, ModelShape, Workload, first_plan
from rljob_memory.sizes import GIB

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "sizing.md").read_text(encoding="utf-8")
GPU_BYTES = [int(gib * GIB) for gib in (23.5, 47.5, 79.1, 139.8)]
"""Memory that CUDA reports for the GPUs of the table."""
USABLE = 0.9
SHAPES = {
    "Qwen2.5-0.5B": (494e6, 24, 896, 2, 64, 151_936, 14, 4864),
    "Qwen3-0.6B": (596e6, 28, 1024, 8, 128, 151_936, 16, 3072),
    "Qwen2.5-1.5B": (1.544e9, 28, 1536, 2, 128, 151_936, 12, 8960),
    "Qwen2.5-3B": (3.086e9, 36, 2048, 2, 128, 151_936, 16, 11_008),
    "Qwen3-4B": (4.02e9, 36, 2560, 8, 128, 151_936, 32, 9728),
    "Qwen2.5-7B": (7.616e9, 28, 3584, 4, 128, 152_064, 28, 18_944),
    "Qwen3-8B": (8.19e9, 36, 4096, 8, 128, 151_936, 32, 12_288),
    "Qwen3-14B": (14.77e9, 40, 5120, 8, 128, 151_936, 40, 17_408),
    "Qwen3-32B": (32.76e9, 64, 5120, 8, 128, 151_936, 64, 25_600),
    "Llama-3.3-70B": (70.554e9, 80, 8192, 8, 128, 128_256, 64, 28_672),
}
"""Parameters, layers, hidden size, KV heads, head dimension, vocabulary, heads and MLP, from config.json."""


def shape(name: str) -> ModelShape:
    parameters, layers, hidden, kv_heads, head_dim, vocabulary, heads, intermediate = map(int, SHAPES[name])
    return ModelShape(parameters, layers, hidden, kv_heads, head_dim, vocabulary, 2, heads, intermediate)


def rows(text: str, name: str) -> list[list[str]]:
    """Cells of the rows of a table whose first cell begins with the name."""
    found = re.findall(rf"^\| ({re.escape(name)}.*)\|$", text, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in found]


def sequences_in(size: int, model: ModelShape, work: Workload) -> int:
    """Sequences of maximum length in a KV cache of this size."""
    one, two = (kv_bytes(model, work, count) for count in (1, 2))
    return 1 + (size - one) // (two - one)


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def least_gpus(name: str, gpu_bytes: int) -> str:
    """Minimum number of GPUs on which the first plan has room for every phase, and the smallest `tensorParallelSize`
    with it, as in the table."""
    for gpus in (1, 2, 4, 8, 16, 32):
        for size in (1, 2, 4, 8):
            if gpus >= size and (plan := plan_if_it_fits(shape(name), gpu_bytes, gpus, size)) is not None:
                offload = f"{', offload' if plan.optimizer_offload else ''}{', weights' if plan.policy_offload else ''}"
                return f"{gpus}{offload}{f', TP {size}' if size > 1 else ''}"
    return "–"


def plan_if_it_fits(model: ModelShape, gpu_bytes: int, gpus: int, size: int) -> MemoryPlan | None:
    """The plan; None if the job does not fit."""
    workload = Workload(16, 8, 512, 1024, policy_ranks=gpus, engines=gpus // size, tensor_parallel_size=size)
    plan = first_plan(MemorySettings(), Hardware("cuda", gpu_bytes, 2048 * GIB, "2.11.0"), model, workload, fused=True)
    state = policy_state_bytes(model, workload, optimizer_offload=plan.optimizer_offload) + POLICY_BESIDE_TORCH_BYTES
    sequence = workload.max_sequence_tokens * activation_bytes_per_token(
        model, checkpointing=plan.activation_checkpointing, fused=True
    )
    update = state + policy_update_bytes(model, workload) + sleeping_engine_bytes(workload) + sequence + 3 * (256 << 20)
    engine = engine_weight_bytes(model, workload) + awake_engine_bytes(workload) + kv_bytes(model, workload, 1)
    optimizer_step = state + 4 * model.parameters // gpus + sleeping_engine_bytes(workload) + OPTIMIZER_STEP_BYTES
    weights = policy_weight_bytes(model, workload, optimizer_offload=plan.optimizer_offload)
    rollout = state - (weights if plan.policy_offload else 0) + engine
    sync = state + engine_weight_bytes(model, workload) + sleeping_engine_bytes(workload)
    sync += weight_sync_bytes(model, plan.sync_bucket_bytes)
    fits = max(update, rollout, optimizer_step) <= gpu_bytes * USABLE and sync <= gpu_bytes
    return plan if fits else None


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("Qwen")])
def test_the_table_of_gpus_is_calculated(name: str) -> None:
    [row] = rows(PAGE.partition("## What uses GPU memory")[0], f"{name} |")
    assert row[2:6] == [least_gpus(name, size) for size in GPU_BYTES]


def test_the_table_of_adapters_is_calculated() -> None:
    parameters = {"Qwen3-8B": 43_646_976, "Qwen3-32B": 134_217_728}  # of rank 16 on all linear layers
    table = rows(PAGE.partition("### Adapters on one GPU")[2].partition("\n## ")[0], "Qwen3-")
    assert len(table) == 5
    for name, gpu, rollouts, responses, *cells in table:
        groups, tokens = int(responses.split()[0]) // 8, int(responses.split()[2])
        work = Workload(groups, 8, 16, tokens, quantized_weights=rollouts != "bfloat16")
        hardware = Hardware("cuda", int(float(gpu.split()[0]) * GIB), 125 * GIB, "2.11.0")
        model = replace(shape(name), adapter_parameters=parameters[name])
        plan, without = (
            first_plan(settings, hardware, model, work, fused=True)
            for settings in (MemorySettings(), MemorySettings(policy_offload="Disabled"))
        )
        offload = "Enabled" if plan.policy_offload else "Disabled"
        counts = [str(sequences_in(each.kv_cache_bytes, model, work)) for each in (plan, without)]
        assert cells == [offload, gib(plan.kv_cache_bytes), *counts], (name, gpu)


@pytest.mark.parametrize(("name", "size"), [("Qwen3-8B", 1), ("Qwen3-14B", 2), ("Llama-3.3-70B", 8)])
def test_the_table_of_rollout_gpus_is_calculated(name: str, size: int) -> None:
    """For policies of four nodes, and more sequences of 8,192 tokens than one engine holds."""
    work = Workload(64, 16, 1024, 7168, 1024, 32, tensor_parallel_size=size, topology="Disaggregated")
    model = shape(name)
    module = 4 * model.parameters // size
    plan = first_plan(MemorySettings(), Hardware("cuda", GPU_BYTES[2], 1024 * GIB, "2.11.0"), model, work)
    caches = [plan.kv_cache_bytes, plan.kv_cache_bytes - module]
    assert caches[0] < kv_bytes(model, work, work.sequences_per_engine), "the memory is the limit"
    with_module, without = ([gib(cache), str(sequences_in(cache, model, work))] for cache in caches)
    [row] = rows((DOCS / "topologies.md").read_text(encoding="utf-8"), f"{name} |")
    assert row[1:] == [str(size), gib(engine_weight_bytes(model, work)), *with_module, gib(module), *without]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(example, {})  # the page's own code
    assert "policy between updates: 15.3 GiB" in capsys.readouterr().out
