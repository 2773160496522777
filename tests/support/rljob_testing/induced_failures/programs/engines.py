"""Failures of a policy and a vLLM engine that share a GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import GIB, Card, floats, gib, memory_log_of, take_card
from rljob_testing.induced_failures.catalogue import NotPossibleHere, induces
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.telemetry.memory import MemoryLog

# A vLLM engine, and a policy in a separate process, as a job has them on one GPU.


ENGINE_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
ENGINE_SECONDS = 75
# Few parameters, and 32 KiB of keys and values a token: a large KV cache has few blocks to keep books of.
MODEL = "random://qwen3?hidden=256&layers=2&heads=32&kvHeads=32&headDim=128"
_LONGEST_UPDATE_SECONDS = 60


def load_vllm() -> None:
    """Import vLLM before the turn on the GPU: the import takes most of an engine's start."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise NotPossibleHere(f"needs vLLM: {error}") from error


def start_engine(**arguments: Any) -> Any:
    """A `vllm.LLM` of a tiny model with random weights; `arguments` override the defaults."""
    import vllm

    directory = resolve_model(MODEL)
    defaults = {"load_format": "dummy", "enforce_eager": True, "max_num_seqs": 16, "gpu_memory_utilization": 0.01}
    engine = vllm.LLM(model=str(directory), **{**defaults, **arguments})
    print(f"the engine is ready (vLLM {vllm.__version__})", flush=True)
    return engine


def card_and_engine(share: float) -> tuple[Card, Any]:
    """This process's turn on the GPU, and an engine that can sleep, whose KV cache has this share of it."""
    card = take_card()
    return card, start_engine(kv_cache_memory_bytes=int(share * card.total_bytes), enable_sleep_mode=True)


@contextmanager
def policy_process(update: Callable[[Path, int], object], folder: Path) -> Iterator[Callable[[int], None]]:
    """Within, a process runs `update(folder, size_bytes)` on request and keeps the result.

    Yields the request, which returns when the update is done or has failed.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_live, args=(update, folder, theirs), daemon=True)
    process.start()
    theirs.close()

    def request(size_bytes: int) -> None:
        ours.send(size_bytes)
        if not ours.poll(_LONGEST_UPDATE_SECONDS):
            raise TimeoutError(f"the policy's update took more than {_LONGEST_UPDATE_SECONDS} s")

    try:
        yield request
    finally:
        process.kill()


def _live(update: Callable[[Path, int], object], folder: Path, connection: Connection) -> None:
    kept = update(folder, connection.recv())
    connection.send("done")
    connection.recv()
    del kept


# A model with hardly anything but activations, for programs in which another process is the cause.


WIDTH = 8192
LAYERS = 8


def train(activation_bytes: int, steps: int = 1) -> nn.Module:
    """Forward and backward passes with `activation_bytes` at their peak; returns the model."""
    layers = [nn.Linear(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    tokens = activation_bytes // ((LAYERS + 1) * WIDTH * 2)
    for _ in range(steps):
        values = model(torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16))
        values.sum().backward()
        model.zero_grad(set_to_none=True)
    return model


# The policy's update runs while the engine holds its KV cache.


ENGINE_SHARE = 0.6
POLICY_SHARE = 0.6


def update(folder: Path, size_bytes: int) -> None:
    train(size_bytes)


@induces(FailureClass.ENGINE_NOT_ASLEEP, seconds=ENGINE_SECONDS, variables=ENGINE_VARIABLES)
def nobody_put_it_to_sleep(folder: Path) -> None:
    """The engine could sleep, and is not asked to."""
    load_vllm()
    with policy_process(update, folder) as update_policy:
        card, engine = card_and_engine(ENGINE_SHARE)
        update_policy(int(POLICY_SHARE * card.total_bytes))
        del engine


@induces(FailureClass.ENGINE_NOT_ASLEEP, seconds=ENGINE_SECONDS, variables=ENGINE_VARIABLES)
def it_was_woken_too_early(folder: Path) -> None:
    """The engine slept, and woke before the update."""
    load_vllm()
    with policy_process(update, folder) as update_policy:
        card, engine = card_and_engine(ENGINE_SHARE)
        engine.sleep(level=2)
        engine.wake_up()
        update_policy(int(POLICY_SHARE * card.total_bytes))


# The engine's memory does not fit: when it starts, when it wakes, or for its longest request.


def keep_weights(folder: Path, size_bytes: int) -> Tensor:
    """The lasting state of a policy."""
    weights = floats(size_bytes)
    MemoryLog(memory_log_of(folder), "cuda").record(1, "update")
    return weights


@induces(FailureClass.KV_CACHE_OVERSIZED, seconds=ENGINE_SECONDS, variables=ENGINE_VARIABLES)
def more_than_the_card(folder: Path) -> None:
    """A KV cache of a requested number of bytes."""
    load_vllm()
    start_engine(kv_cache_memory_bytes=int(1.2 * take_card().total_bytes))


@induces(FailureClass.KV_CACHE_OVERSIZED, seconds=ENGINE_SECONDS, variables=ENGINE_VARIABLES)
def a_share_beside_the_policy(folder: Path) -> None:
    """vLLM's default share, next to a policy that was there first."""
    load_vllm()
    weights = keep_weights(folder, int(0.4 * take_card().total_bytes))
    start_engine(gpu_memory_utilization=0.9)
    del weights


@induces(FailureClass.KV_CACHE_OVERSIZED, seconds=ENGINE_SECONDS, variables=ENGINE_VARIABLES)
def too_few_blocks_for_one_request(folder: Path) -> None:
    """4,096 tokens need 128 MiB."""
    load_vllm()
    take_card()
    start_engine(kv_cache_memory_bytes=64 << 20, max_model_len=4096)


@induces(FailureClass.KV_CACHE_OVERSIZED, seconds=ENGINE_SECONDS, variables=ENGINE_VARIABLES)
def wakes_beside_a_policy_that_grew(folder: Path) -> None:
    """The policy allocated its optimizer state while the engine slept."""
    load_vllm()
    with policy_process(keep_weights, folder) as update_policy:
        card, engine = card_and_engine(0.5)
        engine.sleep(level=2)
        update_policy(int(0.7 * card.total_bytes))
        engine.wake_up()


# torch's cache in the policy's process holds memory that an allocation outside that cache needs.


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
    with policy_process(update_without_empty_cache, folder) as update_policy:
        card, engine = card_and_engine(0.5)
        engine.sleep(level=2)
        update_policy(int(0.7 * card.total_bytes))
        engine.wake_up()


@induces(FailureClass.ALLOCATOR_CACHE)
def a_generation_beside_it(folder: Path) -> None:
    """Rollouts are generated in plain torch, in a separate process."""
    with policy_process(update_without_empty_cache, folder) as update_policy:
        card = take_card()
        update_policy(int(0.7 * card.total_bytes))
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
