"""The tables of docs/sizing.md and docs/topologies.md are what the planner calculates."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_api.memory_plan import MemorySettings
from rljob_memory.budget import Setup
from rljob_memory.budget.gpu import engine_weight_bytes, kv_bytes
from rljob_memory.hardware import Hardware
from rljob_memory.model_shape import ModelShape
from rljob_memory.plan import Choice, best_choice, first_plan
from rljob_memory.sizes import GIB
from rljob_memory.workload import Workload

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "sizing.md").read_text(encoding="utf-8")
GPU_BYTES = [int(gib * GIB) for gib in (23.5, 47.5, 79.1, 139.8)]
"""Memory that CUDA reports for the GPUs of the table."""
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
    one, two = (kv_bytes(work, model, count) for count in (1, 2))
    return 1 + (size - one) // (two - one)


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def least_gpus(name: str, gpu_bytes: int) -> str:
    """Minimum number of GPUs on which the first plan has room for every phase, and the smallest `tensorParallelSize`
    with it, as in the table."""
    for gpus in (1, 2, 4, 8, 16, 32):
        for size in (1, 2, 4, 8):
            if gpus >= size and (choice := choice_for(shape(name), gpu_bytes, gpus, size)).fits:
                plan = choice.plan
                moved = f"{', offload' if plan.optimizer_offload else ''}{', weights' if plan.policy_offload else ''}"
                recomputed = ", checkpointing" if plan.activation_checkpointing else ""
                return f"{gpus}{moved}{recomputed}{f', TP {size}' if size > 1 else ''}"
    return "–"


def choice_for(model: ModelShape, gpu_bytes: int, gpus: int, size: int) -> Choice:
    work = Workload(16, 8, 512, 1024, policy_ranks=gpus, engines=gpus // size, tensor_parallel_size=size)
    return best_choice(
        MemorySettings(), Setup(work, model, Hardware("cuda", gpu_bytes, 2048 * GIB, layers_compiled=True))
    )


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
        hardware = Hardware("cuda", int(float(gpu.split()[0]) * GIB), 125 * GIB, layers_compiled=True)
        model = replace(shape(name), adapter_parameters=parameters[name])
        plan, without = (
            first_plan(settings, Setup(work, model, hardware))
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
    plan = first_plan(MemorySettings(), Setup(work, model, Hardware("cuda", GPU_BYTES[2], 1024 * GIB)))
    caches = [plan.kv_cache_bytes, plan.kv_cache_bytes - module]
    assert caches[0] < kv_bytes(work, model, work.sequences_per_engine), "the memory is the limit"
    with_module, without = ([gib(cache), str(sequences_in(cache, model, work))] for cache in caches)
    [row] = rows((DOCS / "topologies.md").read_text(encoding="utf-8"), f"{name} |")
    assert row[1:] == [str(size), gib(engine_weight_bytes(work, model)), *with_module, gib(module), *without]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(example, {})  # the page's own code
    assert "update: 72.0 GiB, " in capsys.readouterr().out


def test_the_table_of_sizes_of_engines_is_calculated() -> None:
    page = (DOCS / "topologies.md").read_text(encoding="utf-8")
    table = page[page.index("| Qwen3's shapes | GPUs |") :].partition("\n\n")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(found) == 7
    for model, gpus, *seconds, chosen in found:
        work = Workload(16, 8, 64, 1024, policy_ranks=int(gpus), engines=int(gpus), auto_engines=True)
        work = replace(work, max_concurrent_sequences=128 // work.engines)
        setup = Setup(work, shape(f"Qwen3-{model}"), Hardware("cuda", GPU_BYTES[3], 2048 * GIB, layers_compiled=True))
        assert first_plan(MemorySettings(), setup).tensor_parallel_size == int(chosen)
        for size, written in zip((1, 2, 4, 8), seconds, strict=True):
            if size > work.engines:
                assert not written
                continue
            given = replace(setup, work=replace(work.with_engines_of(size), auto_engines=False))
            assert written == f"{best_choice(MemorySettings(), given).budget.seconds():.1f}", (model, gpus, size)
