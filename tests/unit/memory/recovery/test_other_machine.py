"""A plan from another machine is computed again, within the limits that failures have set."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from rljob_api.memory_settings import MemorySettings
from rljob_api.plan_change import DiagnosisStatus, PlanChange, RemedyStatus
from rljob_memory.plan import first_plan
from rljob_memory.recovery.other_machine import differing_facts, plan_facts, rederived
from rljob_memory.sizes import GIB
from rljob_memory.workload import Hardware, ModelShape, Workload

MODEL = ModelShape(596_000_000, 28, 1024, 8, 128, 151_936, 2)
WORK = Workload(64, 16, 1024, 8192, 256, 1, 1)
LARGE = Hardware("cuda", 140 * GIB, 512 * GIB, "2.11")
SMALL = Hardware("cuda", 24 * GIB, 128 * GIB, "2.11")


def change(setting: str) -> PlanChange:
    return PlanChange(
        generation=2,
        time=datetime(2026, 1, 2, tzinfo=UTC),
        attempt=1,
        step=3,
        phase="update",
        role="policy",
        diagnosis=DiagnosisStatus(class_name="ActivationSpike", confidence=0.6, message="x"),
        remedy=RemedyStatus(setting=setting, before="x", after="y"),
        level="Live",
    )


def test_sizes_of_a_larger_gpu_are_not_carried_to_a_smaller_one() -> None:
    on_large = first_plan(MemorySettings(), LARGE, MODEL, WORK)
    fresh = first_plan(MemorySettings(), SMALL, MODEL, WORK)
    changed = on_large.model_copy(
        update={"generation": 2, "micro_batch_tokens": 9300, "activation_checkpointing": True}
    )
    plan = rederived(changed, [change("microBatchTokens"), change("activationCheckpointing")], fresh)
    assert plan.generation == 3
    assert plan.kv_cache_bytes == fresh.kv_cache_bytes < changed.kv_cache_bytes / 4
    assert plan.micro_batch_tokens == min(9300, fresh.micro_batch_tokens)
    assert plan.activation_checkpointing


def test_what_failed_stays_a_limit_on_a_larger_gpu() -> None:
    on_small = first_plan(MemorySettings(), SMALL, MODEL, WORK)
    fresh = first_plan(MemorySettings(), LARGE, MODEL, WORK)
    nodes = ["node-7"]
    changed = on_small.model_copy(update={"generation": 4, "kv_cache_bytes": 2 * GIB, "excluded_nodes": nodes})
    plan = rederived(changed, [change("kvCache")], fresh)
    assert plan == fresh.model_copy(update={"generation": 5, "kv_cache_bytes": 2 * GIB, "excluded_nodes": nodes})


def test_the_same_values_are_the_same_plan() -> None:
    plan = first_plan(MemorySettings(), LARGE, MODEL, WORK).model_copy(update={"generation": 3})
    assert rederived(plan, [], plan.model_copy(update={"generation": 1})) is plan


@pytest.mark.parametrize(
    ("hardware", "work", "expected"),
    [
        (LARGE, WORK, []),
        (replace(LARGE, torch_version="2.13"), WORK, []),
        (replace(LARGE, device_memory_bytes=139 * GIB, host_memory_bytes=500 * GIB), WORK, []),
        (replace(LARGE, host_memory_bytes=768 * GIB), WORK, []),
        (replace(LARGE, host_memory_bytes=128 * GIB), WORK, ["host_memory_bytes 512Gi, now 128Gi"]),
        (replace(LARGE, device_memory_bytes=24 * GIB), WORK, ["device_memory_bytes 140Gi, now 24Gi"]),
        (LARGE, replace(WORK, policy_ranks=8, engines=8), ["policy_ranks 1, now 8", "engines 1, now 8"]),
        (LARGE, replace(WORK, max_prompt_tokens=2048), ["max_prompt_tokens 1024, now 2048"]),
    ],
)
def test_differences_of_the_machine_and_of_the_work_are_named(
    hardware: Hardware, work: Workload, expected: list[str]
) -> None:
    assert differing_facts(plan_facts(LARGE, MODEL, WORK), plan_facts(hardware, MODEL, work)) == expected
    assert differing_facts({}, plan_facts(hardware, MODEL, work)) == []
