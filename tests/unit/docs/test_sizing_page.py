"""docs/sizing.md shows what the planner calculates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rljob_api.memory_settings import MemorySettings
from rljob_memory.estimate import (
    AWAKE_ENGINE_BYTES,
    POLICY_BESIDE_TORCH_BYTES,
    SLEEPING_ENGINE_BYTES,
    activation_bytes_per_token,
    kv_bytes,
    policy_state_bytes,
    policy_update_bytes,
)
from rljob_memory.plan import Hardware, ModelShape, Workload, first_plan
from rljob_memory.sizes import GIB

PAGE = (Path(__file__).parents[3] / "docs" / "sizing.md").read_text(encoding="utf-8")
GPU_BYTES = [int(gib * GIB) for gib in (23.5, 47.5, 79.1, 139.8)]
"""Memory that CUDA reports for the GPUs of the table."""
USABLE = 0.9
BYTES_PER_PARAMETER_IN_OPTIMIZER_STEP = 16
SHAPES = {
    "Qwen2.5-0.5B": (494e6, 24, 896, 2, 64, 151_936),
    "Qwen3-0.6B": (596e6, 28, 1024, 8, 128, 151_936),
    "Qwen2.5-1.5B": (1.544e9, 28, 1536, 2, 128, 151_936),
    "Qwen2.5-3B": (3.086e9, 36, 2048, 2, 128, 151_936),
    "Qwen3-4B": (4.02e9, 36, 2560, 8, 128, 151_936),
    "Qwen2.5-7B": (7.616e9, 28, 3584, 4, 128, 152_064),
    "Qwen3-8B": (8.19e9, 36, 4096, 8, 128, 151_936),
    "Qwen3-14B": (14.77e9, 40, 5120, 8, 128, 151_936),
    "Qwen3-32B": (32.76e9, 64, 5120, 8, 128, 151_936),
}
"""Parameters, layers, hidden size, KV heads, head dimension and vocabulary, from the models' config.json."""


def shape(name: str) -> ModelShape:
    parameters, layers, hidden, kv_heads, head_dim, vocabulary = SHAPES[name]
    return ModelShape(int(parameters), int(layers), int(hidden), int(kv_heads), int(head_dim), int(vocabulary), 2)


def least_gpus(name: str, gpu_bytes: int) -> str:
    """Minimum number of GPUs on which the first plan has room for every phase, as in the table."""
    model = shape(name)
    for gpus in (1, 2, 4, 8, 16, 32):
        workload = Workload(16, 8, max_prompt_tokens=512, max_response_tokens=1024, policy_ranks=gpus, engines=gpus)
        plan = first_plan(MemorySettings(), Hardware("cuda", gpu_bytes, 2048 * GIB, "2.11.0"), model, workload)
        state = (
            policy_state_bytes(model, workload, optimizer_offload=plan.optimizer_offload) + POLICY_BESIDE_TORCH_BYTES
        )
        sequence = workload.max_sequence_tokens * activation_bytes_per_token(
            model, checkpointing=plan.activation_checkpointing
        )
        update = state + policy_update_bytes(model, workload) + SLEEPING_ENGINE_BYTES + sequence + 3 * (256 << 20)
        rollout = state + model.weight_bytes + AWAKE_ENGINE_BYTES + kv_bytes(model, workload, 1)
        optimizer_step = (
            BYTES_PER_PARAMETER_IN_OPTIMIZER_STEP * model.parameters // gpus
            + POLICY_BESIDE_TORCH_BYTES
            + SLEEPING_ENGINE_BYTES
        )
        if max(update, rollout) <= gpu_bytes * USABLE and optimizer_step <= gpu_bytes:
            return f"{gpus}, offload" if plan.optimizer_offload else str(gpus)
    return "–"


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_of_gpus_is_calculated(name: str) -> None:
    [row] = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE, re.MULTILINE)
    assert [cell.strip() for cell in row.split("|")][1:5] == [least_gpus(name, size) for size in GPU_BYTES]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(example, {})  # the page's own code
    assert "policy between updates: 45.8 GiB" in capsys.readouterr().out
