"""The policy's update runs while the engine holds its KV cache."""

from __future__ import annotations

from pathlib import Path

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import take_card
from rljob_testing.induced_failures.catalogue import induces
from rljob_testing.induced_failures.programs.engine import (
    ENGINE_SECONDS,
    ENGINE_VARIABLES,
    load_vllm,
    policy_process,
    start_engine,
)
from rljob_testing.induced_failures.programs.training import train

ENGINE_SHARE = 0.6
POLICY_SHARE = 0.6


def update(folder: Path, size_bytes: int) -> None:
    train(size_bytes)


@induces(FailureClass.ENGINE_NOT_ASLEEP, seconds=ENGINE_SECONDS, variables=ENGINE_VARIABLES)
def nobody_put_it_to_sleep(folder: Path) -> None:
    """The engine could sleep, and is not asked to."""
    load_vllm()
    with policy_process(update, folder) as policy:
        card = take_card()
        engine = start_engine(kv_cache_memory_bytes=int(ENGINE_SHARE * card.total_bytes), enable_sleep_mode=True)
        policy.update(int(POLICY_SHARE * card.total_bytes))
        del engine


@induces(FailureClass.ENGINE_NOT_ASLEEP, seconds=ENGINE_SECONDS, variables=ENGINE_VARIABLES)
def it_was_woken_too_early(folder: Path) -> None:
    """The engine slept, and woke before the update."""
    load_vllm()
    with policy_process(update, folder) as policy:
        card = take_card()
        engine = start_engine(kv_cache_memory_bytes=int(ENGINE_SHARE * card.total_bytes), enable_sleep_mode=True)
        engine.sleep(level=2)
        engine.wake_up()
        policy.update(int(POLICY_SHARE * card.total_bytes))
