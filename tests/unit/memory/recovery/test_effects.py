"""Expected effects of changes against measurements, their observed effects, and the messages about both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import Phase, PlanChange, RemedyStatus, Role
from rljob_api.step_report import MemoryPressure, RankMemory
from rljob_memory.budget import Setup
from rljob_memory.budget.gpu import activation_bytes_per_token, logits_bytes
from rljob_memory.model_shape import ModelShape
from rljob_memory.recovery import messages, observed, role_that_shows
from rljob_memory.sizes import GIB
from rljob_memory.workload import Workload
from tests.unit.memory.recovery.failures import (
    ALL_OFF,
    FIRST_PLAN,
    FRAGMENTED,
    H200,
    change_after,
    constraints,
    diagnosis,
    failure,
)

# --- measurements of a job that ran out of memory on an H200: 4 layers of Qwen3-0.6B's shape, not compiled ---

FOUR_LAYERS = ModelShape(
    218_507_264, layers=4, hidden=1024, kv_heads=8, head_dim=128, vocabulary=151_936, bytes_per_parameter=2
)
MEASURED_JOB = Setup(Workload(16, 16, 16, 256), FOUR_LAYERS, replace(H200, layers_compiled=False))
PEAK_WITH_16384_TOKENS, PEAK_WITH_8192_TOKENS = 90_457_448_960, 60_895_002_624
"""Bytes allocated, and reserved, in an update that computes the logits of this many tokens at a time."""
IN_THE_FORWARD_PASS = 142_034_568_479
"""Bytes allocated with 256 sequences of 257 tokens at once, when a fourth tensor of logits was requested."""


@pytest.mark.parametrize(
    ("chunk_tokens", "numbers", "after", "frees", "tolerance"),
    [
        (
            32_768,
            {
                "requested_bytes": 19_917_910_835,
                "free_bytes": 19_166_291_558,
                "allocated_bytes": 127_753_802_220,
            },
            "8192",
            87_554_806_252,
            0.05,
        ),
        # the forward pass shows only a part of the peak, which would have been more than the card
        (
            131_072,
            {
                "requested_bytes": 39_825_084_252,
                "free_bytes": 5_272_072_356,
                "allocated_bytes": IN_THE_FORWARD_PASS,
            },
            "17408",
            IN_THE_FORWARD_PASS + 39_825_084_252 - PEAK_WITH_16384_TOKENS,
            0.1,
        ),
    ],
)
def test_logits_that_did_not_fit(
    chunk_tokens: int, numbers: dict[str, int], after: str, frees: int, tolerance: float
) -> None:
    plan = FIRST_PLAN.model_copy(update={"micro_batch_tokens": 131_072, "logprob_chunk_tokens": chunk_tokens})
    spike = failure(diagnosis("ActivationSpike", **numbers))
    remedy = change_after(spike, plan, constraints(setup=MEASURED_JOB)).change.remedy
    assert (remedy.setting, remedy.after) == ("logprobChunkTokens", after)
    assert remedy.expected_bytes == pytest.approx(frees, rel=tolerance)


def test_activations_and_logits_of_a_token() -> None:
    more_logits = logits_bytes(FOUR_LAYERS, 8_192, compiled=False)
    assert more_logits == pytest.approx(PEAK_WITH_16384_TOKENS - PEAK_WITH_8192_TOKENS, rel=0.15)
    logits = 65_536 * 4 * 151_936
    kept = IN_THE_FORWARD_PASS - 3 * logits - 2_622_636_544  # and weights and moments
    each = activation_bytes_per_token(FOUR_LAYERS, checkpointing=False, compiled=False)
    assert 256 * 257 * each == pytest.approx(kept, rel=0.1)


def test_a_bucket_of_several_ranks_counts_twice_packed_and_once_gathered() -> None:
    spike = failure(diagnosis("WeightSyncSpike"), phase="sync")
    plan = FIRST_PLAN.model_copy(update={"sync_bucket_bytes": 512 << 20})
    remedy = change_after(spike, plan, constraints(setup=MEASURED_JOB.with_work(policy_ranks=2)))
    assert remedy.plan.sync_bucket_bytes == FOUR_LAYERS.largest_parameter_bytes
    all_but_the_largest = FOUR_LAYERS.weight_bytes - FOUR_LAYERS.largest_parameter_bytes
    assert remedy.change.remedy.expected_bytes == pytest.approx(3 * all_but_the_largest, rel=0.01)


# --- the observed effect ---


def a_change(
    failure_class: str, role: Role = "policy", plan: MemoryPlan = ALL_OFF, phase: Phase = "update", **more: int
) -> PlanChange:
    given = constraints(host_memory_limit_bytes=16 * GIB, recovery={"maxHostMemory": "64Gi"})
    evidence = failure(diagnosis(failure_class, **more), role=role, phase=phase)
    return change_after(evidence, plan, given).change


def memory(role: Role = "policy", *, total: int = 140, **gib: int) -> RankMemory:
    """Sizes in GiB; nothing is cached unless `allocated` says so."""
    peaks = {"peak_reserved": gib["reserved"]} if "reserved" in gib else {}
    sizes: dict[str, Any] = {f"{name}_bytes": size * GIB for name, size in (gib | peaks).items()}
    return RankMemory(role=role, rank=0, device_total_bytes=total * GIB, **sizes)


BUSY_ENGINE, LESS_BUSY_ENGINE = (memory("rollout", reserved=60, device_free=size) for size in (1, 11))
POLICY_AFTERWARDS = memory(reserved=4, allocated=3)
IN_A_SYNC: dict[str, Any] = {"role": "rollout", "phase": "sync"}


@pytest.mark.parametrize(
    ("failure_class", "more", "before", "after", "gib"),
    [
        # a failed request counts as needed; more memory in use is a negative effect
        (
            "Fragmentation",
            {"requested_bytes": 2 * GIB, "reserved_but_unallocated_bytes": 6 * GIB},
            memory(reserved=50),
            memory(reserved=46),
            6,
        ),
        ("Fragmentation", {}, memory(reserved=40), memory(reserved=43), -3),
        ("Fragmentation", {}, None, memory(reserved=3), None),
        ("Fragmentation", {}, memory(reserved=3), None, None),
        # a smaller engine shows on the device
        ("KVCacheOversized", {"role": "rollout", "plan": FIRST_PLAN}, BUSY_ENGINE, LESS_BUSY_ENGINE, 10),
        # the policy failed with 30 GiB, and the sample afterwards was taken after its update, with 3 GiB
        (
            "EngineNotAsleep",
            {"requested_bytes": 9 * GIB},
            memory(reserved=30, device_free=5),
            memory(reserved=3, device_free=134),
            102,
        ),
        # the policy's cache is compared with itself
        ("AllocatorCache", IN_A_SYNC | {"policy_cache_bytes": 90 * GIB}, BUSY_ENGINE, POLICY_AFTERWARDS, 89),
        ("AllocatorCache", IN_A_SYNC, BUSY_ENGINE, POLICY_AFTERWARDS, None),
        # the effect of a raised limit is the difference
        ("HostMemory", {}, None, None, 8),
    ],
)
def test_the_observed_effect_compares_memory_before_and_after(
    failure_class: str, more: dict[str, Any], before: RankMemory | None, after: RankMemory | None, gib: int | None
) -> None:
    change = a_change(failure_class, **more)
    proven = observed(change, before, after)
    assert proven.remedy.observed_bytes == (None if gib is None else gib * GIB)
    assert proven.model_copy(update={"remedy": change.remedy}) == change, "nothing else changes"


def test_on_a_cpu_only_a_new_process_can_show_less() -> None:
    change, before, after = a_change("ActivationSpike"), memory(total=0, peak_rss=9), memory(total=0, peak_rss=4)
    assert observed(change, before, before).remedy.observed_bytes is None
    respawned = change.model_copy(update={"level": "RespawnRole"})
    assert observed(respawned, before, after).remedy.observed_bytes == 5 * GIB


def test_the_effect_shows_in_the_role_whose_memory_changes() -> None:
    less_kv_cache = a_change("KVCacheOversized", role="rollout", plan=FIRST_PLAN)
    assert (less_kv_cache.remedy.setting, role_that_shows(less_kv_cache)) == ("kvCache", "rollout")
    empty_cache = a_change("AllocatorCache", role="rollout", phase="sync")
    assert (empty_cache.remedy.setting, role_that_shows(empty_cache)) == ("emptyCache", "policy")


# --- messages ---

SPIKE = diagnosis("ActivationSpike", requested_bytes=2 * GIB, free_bytes=GIB)


def made(setting: str, before: str, after: str, **more: Any) -> PlanChange:
    sizes = {name: more.pop(name) for name in ("expected_bytes", "observed_bytes") if name in more}
    change = change_after(failure(SPIKE, step=41), FIRST_PLAN, constraints()).change
    remedy = RemedyStatus(setting=setting, before=before, after=after, **sizes)
    return change.model_copy(update={"remedy": remedy, **more})


def test_a_failure_names_its_process_place_cause_and_numbers() -> None:
    message = messages.out_of_memory_message
    assert message("policy", 3, "update", 7, SPIKE) == (
        "policy rank 3 in update, step 7: ActivationSpike (2.00 GiB requested, 1.00 GiB free)"
    )
    assert message("controller", 0, None, 7, FRAGMENTED) == (
        "the controller at startup, step 7: Fragmentation (6.00 GiB reserved but unusable, 2.00 GiB requested)"
    )
    pressure = MemoryPressure(diagnosis=diagnosis("RetainedGraph"), role="policy", steps_left=12)
    assert messages.pressure_message(pressure) == (
        "policy rank 0 is projected to run out of memory in 12 steps: RetainedGraph: It was RetainedGraph."
    )


@pytest.mark.parametrize(
    ("made_of", "more", "expected"),
    [
        (
            ("microBatchTokens", "192", "96"),
            {"expected_bytes": 2 << 20},
            "microBatchTokens 192 → 96 (generation 2, expected to free 2 MiB)",
        ),
        (("kvCache", "2Gi", "8Gi"), {"expected_bytes": 6 * GIB}, "kvCache 2Gi → 8Gi (generation 2)"),
        (
            ("processes", "kept", "fresh"),
            {"expected_bytes": 3 * GIB},
            "restarting processes, the memory plan is unchanged (generation 2, expected to free 3.00 GiB)",
        ),
        (
            ("detachMetrics", "Disabled", "Enabled"),
            {"preventive": True},
            "detachMetrics Disabled → Enabled (generation 2, before a failure)",
        ),
    ],
)
def test_a_change_names_both_values_and_the_memory_that_it_frees(
    made_of: tuple[str, str, str], more: dict[str, Any], expected: str
) -> None:
    assert messages.changed_message(made(*made_of, **more)) == expected


def test_a_recovery_names_the_step_the_seconds_and_the_freed_memory() -> None:
    recovered = made("kvCache", "9Gi", "3Gi", seconds_to_recover=38.2)
    assert messages.recovered_message(recovered) == "resumed at step 41 after 38 s"
    freed = made("kvCache", "9Gi", "3Gi", seconds_to_recover=38.2, observed_bytes=6 * GIB)
    assert messages.recovered_message(freed) == "resumed at step 41 after 38 s; freed 6.00 GiB"
    adjusted = change_after(failure(FRAGMENTED), ALL_OFF, constraints()).message
    assert adjusted.startswith("Fragmentation: It was Fragmentation; expandableSegments Disabled → Enabled (generation")
    assert adjusted.endswith("(adjustment 1 of 6)")
