"""The engine's memory does not fit: when it starts, when it wakes, or for its longest request."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import floats, memory_log_of, take_card
from rljob_testing.induced_failures.catalogue import induces
from rljob_testing.induced_failures.programs.engine import (
    ENGINE_SECONDS,
    ENGINE_VARIABLES,
    load_vllm,
    policy_process,
    start_engine,
)
from rljob_trainer.telemetry.memory import MemoryLog


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
    """vLLM's default share, beside a policy that was there first."""
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
    with policy_process(keep_weights, folder) as policy:
        card = take_card()
        engine = start_engine(kv_cache_memory_bytes=int(0.5 * card.total_bytes), enable_sleep_mode=True)
        engine.sleep(level=2)
        policy.update(int(0.7 * card.total_bytes))
        engine.wake_up()
