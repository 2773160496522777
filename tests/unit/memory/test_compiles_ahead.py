"""The policy compiles while the engine starts if the GPU has room for both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.memory_settings import MemorySettings
from rljob_memory.plan import Hardware, ModelShape, Workload, compiles_ahead, first_plan
from rljob_memory.sizes import GIB

QWEN3_8B = ModelShape(
    8_190_000_000, layers=36, hidden=4096, kv_heads=8, head_dim=128, vocabulary=151_936, bytes_per_parameter=2
)
STEP = Workload(16, 8, max_prompt_tokens=16, max_response_tokens=1024)


@pytest.mark.parametrize(("card_gib", "ahead"), [(139, True), (79, True), (56, False)])
def test_it_needs_room_beside_an_awake_engine(card_gib: int, ahead: bool) -> None:
    hardware = Hardware("cuda", card_gib * GIB, 256 * GIB, "2.11.0")
    plan = first_plan(MemorySettings(kv_cache=18 * GIB, optimizer_offload="Enabled"), hardware, QWEN3_8B, STEP)
    assert compiles_ahead(hardware, QWEN3_8B, STEP, plan) is ahead


def test_a_policy_that_makes_room_first_compiles_later() -> None:
    hardware = Hardware("cuda", 139 * GIB, 256 * GIB, "2.11.0")
    plan = first_plan(MemorySettings(policy_offload="Enabled"), hardware, QWEN3_8B, STEP)
    assert not compiles_ahead(hardware, QWEN3_8B, STEP, plan)


def test_an_engine_elsewhere_takes_no_room() -> None:
    hardware = Hardware("cuda", 56 * GIB, 256 * GIB, "2.11.0")
    apart = replace(STEP, topology="Disaggregated")
    plan = first_plan(MemorySettings(kv_cache=18 * GIB, optimizer_offload="Enabled"), hardware, QWEN3_8B, apart)
    assert compiles_ahead(hardware, QWEN3_8B, apart, plan)


def test_nothing_is_compiled_on_a_cpu() -> None:
    hardware = Hardware("cpu", 0, 64 * GIB, "2.13.0")
    assert not compiles_ahead(hardware, QWEN3_8B, STEP, first_plan(MemorySettings(), hardware, QWEN3_8B, STEP))


@pytest.mark.parametrize(("card_gib", "ahead"), [(139, True), (79, True), (74, False)])
def test_several_ranks_need_room_for_gathered_weights_and_gradients(card_gib: int, ahead: bool) -> None:
    hardware, two = Hardware("cuda", card_gib * GIB, 256 * GIB, "2.11.0"), replace(STEP, policy_ranks=2, engines=2)
    plan = first_plan(MemorySettings(kv_cache=18 * GIB, optimizer_offload="Enabled"), hardware, QWEN3_8B, two)
    assert compiles_ahead(hardware, QWEN3_8B, two, plan) is ahead


def test_more_ranks_hold_less_of_the_state() -> None:
    hardware = Hardware("cuda", 28 * GIB, 256 * GIB, "2.11.0")
    found = {}
    for ranks in (2, 4):
        apart = replace(STEP, topology="Disaggregated", policy_ranks=ranks)
        plan = first_plan(MemorySettings(optimizer_offload="Enabled"), hardware, QWEN3_8B, apart)
        found[ranks] = compiles_ahead(hardware, QWEN3_8B, apart, plan)
    assert found == {2: False, 4: True}


def test_several_ranks_do_not_use_all_of_the_memory() -> None:
    """A KV cache that takes all planned memory leaves no room, although a tenth of the GPU is unplanned."""
    hardware, two = Hardware("cuda", 139 * GIB, 256 * GIB, "2.11.0"), replace(STEP, policy_ranks=2, engines=2)
    plan = first_plan(MemorySettings(kv_cache=50 * GIB), hardware, QWEN3_8B, two)
    assert not compiles_ahead(hardware, QWEN3_8B, two, plan)
    assert compiles_ahead(hardware, QWEN3_8B, two, plan.model_copy(update={"kv_cache_bytes": 40 * GIB}))
