"""docs/topologies.md shows what a rollout GPU holds, with and without the policy's module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rljob_memory.estimate import awake_engine_bytes, engine_weight_bytes, kv_bytes
from rljob_memory.plan import ModelShape, Workload
from rljob_memory.sizes import GIB

PAGE = (Path(__file__).parents[3] / "docs" / "topologies.md").read_text(encoding="utf-8")
USABLE_BYTES = int(0.9 * 79.1 * GIB)
"""The part of a GPU of 80 GiB that the planner uses."""
SEQUENCE_TOKENS = 8192
FLOAT32_BYTES = 4
MODELS = {
    "Qwen3-8B": (ModelShape(8_190_000_000, 36, 4096, 8, 128, 151_936, 2, 32, 12_288), 1),
    "Qwen3-14B": (ModelShape(14_770_000_000, 40, 5120, 8, 128, 151_936, 2, 40, 17_408), 2),
    "Llama-3.3-70B": (ModelShape(70_554_000_000, 80, 8192, 8, 128, 128_256, 2, 64, 28_672), 8),
}
"""Shape and `tensorParallelSize`."""


def cells(name: str) -> list[str]:
    """`tensorParallelSize`; the engine's weights, the room for the KV cache and its sequences without the module; the
    module, and the same room with it."""
    model, size = MODELS[name]
    workload = Workload(1, 1, 0, SEQUENCE_TOKENS, tensor_parallel_size=size, topology="Disaggregated")
    weights = engine_weight_bytes(model, workload)
    room = USABLE_BYTES - weights - awake_engine_bytes(workload)
    module = FLOAT32_BYTES * model.parameters // size
    return [
        str(size),
        gib(weights),
        *room_for(room, model, workload),
        gib(module),
        *room_for(room - module, model, workload),
    ]


def room_for(room: int, model: ModelShape, workload: Workload) -> tuple[str, str]:
    sequences = room // kv_bytes(model, workload, 1) if room > 0 else 0
    return (gib(room), str(sequences)) if sequences else ("none", "0")


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_rollout_gpus_is_calculated(name: str) -> None:
    [row] = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE, re.MULTILINE)
    assert [cell.strip() for cell in row.split("|")] == cells(name)
