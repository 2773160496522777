"""Failures of a job whose policy and engines have GPUs of their own: no remedy of colocation is chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest

from rljob_api.memory_settings import MemorySettings
from rljob_api.plan_change import Phase, Role
from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import Failure, evidence_around
from rljob_memory.evidence.failure import DeviceMemory, FailureKind
from rljob_memory.plan import first_plan
from rljob_memory.recovery import profile_of
from rljob_memory.sizes import GIB
from tests.unit.memory.recovery.failures import (
    ALL_OFF,
    EVERY_LEVEL,
    H200,
    QWEN3_0_6B,
    SIXTEEN_GROUPS,
    answers_to,
    constraints,
    diagnosis,
    failure,
    settings_in_order,
)

WORK = replace(SIXTEEN_GROUPS, topology="Disaggregated")
APART = profile_of(H200, QWEN3_0_6B, WORK, fused=True, shared_memory_bytes=8 * GIB)
OF_COLOCATION = {"rolloutSleep", "emptyCache", "weightExport"}
OF_THE_OTHER_GPU = {
    "rollout": {"optimizerOffload", "expandableSegments", "activationCheckpointing", "microBatchTokens"},
    "policy": {"kvCache"},
}


@pytest.mark.parametrize("failure_class", sorted(FailureClass))
@pytest.mark.parametrize(
    ("role", "phase"),
    [("rollout", None), ("rollout", "rollout"), ("rollout", "sync"), ("policy", "update"), ("policy", "sync")],
)
def test_no_change_frees_memory_of_another_gpu(failure_class: str, role: Role, phase: Phase | None) -> None:
    evidence = failure(diagnosis(failure_class, requested_bytes=2 * GIB), role=role, phase=phase)
    changes, _ = answers_to(repeat(evidence, 30), ALL_OFF, constraints(EVERY_LEVEL, profile=APART))
    assert not (OF_COLOCATION | OF_THE_OTHER_GPU[role]) & set(settings_in_order(changes))


def test_an_engine_of_its_own_gets_the_whole_gpu() -> None:
    busy = replace(WORK, prompts_per_step=512, group_size=16, max_response_tokens=16_000)
    plan = first_plan(MemorySettings(), H200, QWEN3_0_6B, busy)
    assert not plan.empty_cache
    assert plan.rollout_sleep == "Disabled"
    assert plan.kv_cache_bytes + QWEN3_0_6B.weight_bytes > 0.8 * H200.device_memory_bytes
    small = first_plan(MemorySettings(), replace(H200, engine_device_memory_bytes=24 * GIB), QWEN3_0_6B, busy)
    assert small.kv_cache_bytes < 24 * GIB
    assert small.micro_batch_tokens == plan.micro_batch_tokens, "the policy's GPU is the same"


@pytest.mark.parametrize(("topology", "expected"), [("Colocated", "EngineNotAsleep"), ("Disaggregated", "Foreign")])
def test_memory_of_others_on_the_policys_gpu_is_no_engine(tmp_path: Path, topology: str, expected: str) -> None:
    (tmp_path / "ledger.jsonl").write_text(json.dumps({"kind": "attempt", "plan_facts": {"topology": topology}}) + "\n")
    device = DeviceMemory(
        total_bytes=140 * GIB, free_bytes=GIB, process_bytes=40 * GIB, allocated_bytes=38 * GIB, requested_bytes=2 * GIB
    )
    out = Failure(FailureKind.ALLOCATOR, device=device, role="policy", phase="update")
    found = diagnose(evidence_around(out, tmp_path, ALL_OFF))
    assert found[0].failure_class.startswith(expected)
