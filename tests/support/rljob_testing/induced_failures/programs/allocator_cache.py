"""torch's cache in the policy's process holds memory that an allocation outside that cache needs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import GIB, gib, memory_log_of, take_card
from rljob_testing.induced_failures.catalogue import induces
from rljob_testing.induced_failures.programs.engine import (
    ENGINE_SECONDS,
    ENGINE_VARIABLES,
    load_vllm,
    policy_process,
    start_engine,
)
from rljob_testing.induced_failures.programs.training import train
from rljob_trainer.telemetry.memory import MemoryLog

CLASSIC_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
SEGMENTS_GIB = (1, 10 / 1024, 0.5 / 1024)
"""Tensor sizes that get a segment of their own, down to the allocator's smallest segment of 2 MiB."""


def update_without_empty_cache(folder: Path, size_bytes: int) -> nn.Module:
    """The model stays allocated, and torch caches the memory of the activations."""
    model = train(size_bytes)
    MemoryLog(memory_log_of(folder), "cuda").record(1, "update")
    return model


def generate(prompts: Tensor) -> Tensor:
    """Memory of a generation in plain torch: keys and values [sequences, tokens, width] in bfloat16."""
    return torch.zeros(*prompts.shape, 4096, dtype=torch.bfloat16, device="cuda")


@induces(FailureClass.ALLOCATOR_CACHE, seconds=ENGINE_SECONDS, variables=ENGINE_VARIABLES)
def an_engine_wakes_beside_it(folder: Path) -> None:
    """The engine slept during the update; its KV cache does not fit again."""
    load_vllm()
    with policy_process(update_without_empty_cache, folder) as policy:
        card = take_card()
        engine = start_engine(kv_cache_memory_bytes=int(0.5 * card.total_bytes), enable_sleep_mode=True)
        engine.sleep(level=2)
        policy.update(int(0.7 * card.total_bytes))
        engine.wake_up()


@induces(FailureClass.ALLOCATOR_CACHE)
def a_generation_beside_it(folder: Path) -> None:
    """Rollouts are generated in plain torch, in a separate process."""
    with policy_process(update_without_empty_cache, folder) as policy:
        card = take_card()
        policy.update(int(0.7 * card.total_bytes))
        tokens = int(0.4 * card.total_bytes) // (4096 * 2)
        generate(torch.zeros(64, tokens // 64))


@induces(FailureClass.ALLOCATOR_CACHE, variables=CLASSIC_SEGMENTS)
def nccl_starts_beside_it(folder: Path) -> None:
    """NCCL requests the buffers of its first collective from the driver."""
    take_card()
    gradient, tensors = torch.ones(1024, device="cuda"), []
    for size_gib in SEGMENTS_GIB:
        with suppress(torch.OutOfMemoryError):
            while True:
                tensors.append(gib(size_gib))
    del tensors
    MemoryLog(memory_log_of(folder), "cuda").record(1, "update")
    print(f"reserved: {torch.cuda.memory_reserved() / GIB:.2f} GiB")
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(gradient)
    torch.cuda.synchronize()
