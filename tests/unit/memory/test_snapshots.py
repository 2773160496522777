"""Several ranks keep a copy of their state in host memory if there is room for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_memory.plan import Hardware, ModelShape, Workload, keeps_snapshots
from rljob_memory.sizes import GIB

QWEN3_0_6B = ModelShape(
    596_000_000, layers=28, hidden=1024, kv_heads=8, head_dim=128, vocabulary=151_936, bytes_per_parameter=2
)
TWO_RANKS = Workload(16, 8, max_prompt_tokens=100, max_response_tokens=512, policy_ranks=2, engines=2)
COPIES_GIB = 2 * 12 * 596e6 / GIB
"""A snapshot and a checkpoint of 12 bytes a parameter. No rank reads the weights as a whole."""


@pytest.mark.parametrize(("host_gib", "kept"), [(1.9 * COPIES_GIB, False), (2.1 * COPIES_GIB, True)])
def test_a_host_holds_snapshots_in_half_of_its_memory(host_gib: float, kept: bool) -> None:
    hardware = Hardware("cuda", 140 * GIB, int(host_gib * GIB), "2.11.0")
    assert keeps_snapshots(hardware, QWEN3_0_6B, TWO_RANKS) is kept


@pytest.mark.parametrize("ranks", [2, 8])
def test_an_8b_model_needs_366_gib_for_any_number_of_ranks(ranks: int) -> None:
    shape = ModelShape(8_190_000_000, 36, 4096, 8, 128, 151_936, 2)
    work = replace(TWO_RANKS, policy_ranks=ranks, engines=ranks)
    for host_gib, kept in ((360, False), (372, True)):
        assert keeps_snapshots(Hardware("cuda", 140 * GIB, host_gib * GIB, "2.11.0"), shape, work) is kept


def test_a_single_rank_keeps_no_snapshot() -> None:
    roomy = Hardware("cuda", 140 * GIB, 2_000 * GIB, "2.11.0")
    assert not keeps_snapshots(roomy, QWEN3_0_6B, replace(TWO_RANKS, policy_ranks=1))


def test_moments_in_bfloat16_need_less_room() -> None:
    hardware = Hardware("cuda", 140 * GIB, int(1.9 * COPIES_GIB * GIB), "2.11.0")
    assert keeps_snapshots(hardware, QWEN3_0_6B, replace(TWO_RANKS, moment_bytes=2))
