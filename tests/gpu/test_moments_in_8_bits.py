"""Moments in 8 bits on a GPU: bit-identical for any place and bucketing of the state; the time of a step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rljob_api.algorithm import AlgorithmSpec
from rljob_memory.budget.gpu import STREAMING_BYTES
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.optimizer import MasterAdamW

pytestmark = pytest.mark.gpu
ELEMENTS = 1 << 28
SECONDS = 2.0 * ELEMENTS / 8.19e9
"""Maximum seconds of a step on the device: two seconds for 8.19e9 parameters."""


def optimizer_of(rows: int, columns: int, matrices: int, *, offload: float, bucket: int) -> Any:
    draw = torch.Generator("cuda").manual_seed(0)
    model = nn.Module()
    for number in range(matrices):
        values = torch.randn(rows, columns, device="cuda", generator=draw).mul_(0.02).bfloat16()
        model.register_parameter(f"matrix{number}", nn.Parameter(values))
    plan = memory_plan(optimizer_offload=offload)
    config = PolicyConfig(
        Path(), Path(), "cuda", "bfloat16", AlgorithmSpec(steps=1, learning_rate=1e-3), plan, moments="int8"
    )
    return MasterAdamW(model, config, {}, bucket_elements=bucket)  # type: ignore[arg-type]


def step(optimizer: Any, seed: int) -> None:
    draw = torch.Generator("cuda").manual_seed(seed)
    for parameter in optimizer.parameters.values():
        noise = torch.randn(parameter.shape, device="cuda", generator=draw, dtype=parameter.dtype)
        (parameter * noise * 1e-5).sum().backward()
    optimizer.step()
    optimizer.gradients.clear()


def test_a_step_gives_the_same_bits_streamed_and_in_other_buckets() -> None:
    results = []
    for offload, bucket in ((0, 1 << 25), (1, 1 << 25), (0, 1 << 22), (1, 3_000_000), (0.4, 3_000_000)):
        optimizer = optimizer_of(4099, 1001, 6, offload=offload, bucket=bucket)
        for seed in range(3):
            step(optimizer, seed)
        torch.cuda.synchronize()
        results.append(
            {
                f"{name}.{key}": values.cpu().clone()
                for name, weight in optimizer.parameters.items()
                for key, values in ({"weight": weight.detach()} | optimizer.state_of(name)).items()
            }
        )
    for other in results[1:]:
        for name, values in results[0].items():
            assert torch.equal(values, other[name]), name


def test_a_step_takes_at_most_two_seconds_for_8_billion_parameters() -> None:
    optimizer = optimizer_of(1 << 14, 1 << 12, 4, offload=0, bucket=1 << 25)
    step(optimizer, 0)
    for parameter in optimizer.parameters.values():
        (parameter * 1e-5).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    optimizer.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    assert torch.cuda.max_memory_allocated() - before <= STREAMING_BYTES
    assert seconds <= SECONDS, f"{seconds * 8.19e9 / ELEMENTS:.2f} s for 8.19e9 parameters"
