"""docs/topologies.md shows what a rollout GPU holds, with and without the policy's module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rljob_api.job import RLJobSpec
from rljob_api.memory_settings import MemorySettings
from rljob_memory.estimate import engine_weight_bytes, kv_bytes
from rljob_memory.plan import Hardware, ModelShape, Workload, first_plan
from rljob_memory.planning.job_workload import workload_of
from rljob_memory.sizes import GIB

PAGE = (Path(__file__).parents[3] / "docs" / "topologies.md").read_text(encoding="utf-8")
GPUS = Hardware("cuda", int(79.1 * GIB), 1024 * GIB, "2.11.0")
"""GPUs of 80 GiB."""
FLOAT32_BYTES = 4
MODELS = {
    "Qwen3-8B": (ModelShape(8_190_000_000, 36, 4096, 8, 128, 151_936, 2, 32, 12_288), 1),
    "Qwen3-14B": (ModelShape(14_770_000_000, 40, 5120, 8, 128, 151_936, 2, 40, 17_408), 2),
    "Llama-3.3-70B": (ModelShape(70_554_000_000, 80, 8192, 8, 128, 128_256, 2, 64, 28_672), 8),
}
"""Shape and `tensorParallelSize`."""


def workload(size: int) -> Workload:
    """Of a job with more sequences of 8,192 tokens than one engine holds."""
    spec = {
        "model": {"uri": "hf://org/name"},
        "task": {"name": "digits"},
        "algorithm": {
            "steps": 1,
            "promptsPerStep": 64,
            "groupSize": 16,
            "maxPromptTokens": 1024,
            "maxResponseTokens": 7168,
        },
        "topology": "Disaggregated",
        "policy": {"replicas": 4, "gpusPerReplica": 8},
        "rollout": {"gpusPerReplica": size, "tensorParallelSize": size, "maxConcurrentSequences": 1024},
    }
    return workload_of(RLJobSpec.model_validate(spec))


def cells(name: str) -> list[str]:
    """`tensorParallelSize`; the engine's weights, its KV cache in the plan and the sequences without the module; the
    module, and what it leaves of that cache."""
    model, size = MODELS[name]
    work = workload(size)
    plan = first_plan(MemorySettings(), GPUS, model, work)
    assert plan.kv_cache_bytes < kv_bytes(model, work, work.sequences_per_engine), "the memory is the limit"
    module = FLOAT32_BYTES * model.parameters // size
    return [
        str(size),
        gib(engine_weight_bytes(model, work)),
        *cache_of(plan.kv_cache_bytes, model, work),
        gib(module),
        *cache_of(plan.kv_cache_bytes - module, model, work),
    ]


def cache_of(size: int, model: ModelShape, work: Workload) -> tuple[str, str]:
    sequences = max(count for count in range(work.sequences_per_engine) if kv_bytes(model, work, count) <= size)
    return gib(size), str(sequences)


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_rollout_gpus_is_calculated(name: str) -> None:
    [row] = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE, re.MULTILINE)
    assert [cell.strip() for cell in row.split("|")] == cells(name)
