"""The bytes that another job with adapters or smaller moments would save, and those that its remedies free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.memory_profile import MemoryProfile
from rljob_api.memory_settings import MemorySettings
from rljob_memory.diagnosis import FailureClass
from rljob_memory.plan import ModelShape, Workload, first_plan
from rljob_memory.planning.model_size import with_adapters
from rljob_memory.recovery import GiveUp, profile_of
from rljob_memory.sizes import GIB, human_bytes
from tests.unit.memory.recovery.failures import (
    FACTS,
    FIRST_PLAN,
    H200,
    QWEN3_0_6B,
    SIXTEEN_GROUPS,
    answer,
    answers_to,
    constraints,
    diagnosis,
    explanation_of,
    failure,
    settings_in_order,
)

PARAMETERS = QWEN3_0_6B.parameters
ADAPTED = with_adapters(QWEN3_0_6B, 16)
USED_UP = {"maxAdjustments": 0}


def profile(model: ModelShape, workload: Workload = SIXTEEN_GROUPS) -> MemoryProfile:
    return profile_of(H200, model, workload, fused=True)


def advice(
    failure_class: str, *, facts: MemoryProfile = FACTS, offloaded: bool = False, missing: int = 1, role: str = "policy"
) -> str:
    """The advice for another job when recovery gives up; empty if there is none."""
    cause = diagnosis(failure_class, requested_bytes=missing, free_bytes=0)
    plan = FIRST_PLAN.model_copy(update={"optimizer_offload": offloaded})
    end = answer(failure(cause, role=role), plan, constraints(profile=facts, recovery=USED_UP))  # type: ignore[arg-type]
    assert isinstance(end, GiveUp)
    return "".join(end.explanation.partition("Another job would")[1:])


def test_the_savings_are_those_of_the_jobs_shape() -> None:
    small_moments, adapters = 4 * PARAMETERS, ADAPTED.adapter_parameters
    with_adapters_bytes = 2 * PARAMETERS + (4 + 8 + 4) * adapters
    saved = (4 + 8 + 4) * PARAMETERS - with_adapters_bytes
    assert FACTS.smaller_moments_bytes == small_moments
    assert FACTS.adapter_policy_bytes == with_adapters_bytes
    facts = FACTS.model_copy(update={"device_total_bytes": 40 * GIB})
    assert advice("OptimizerState", facts=facts) == (
        f"Another job would need less of each GPU: {human_bytes(small_moments)} less with policy.optimizer.moments: "
        f"bfloat16 or {human_bytes(saved)} less with policy.lora (calculated)."
    )


def test_only_settings_that_save_the_missing_memory_are_named() -> None:
    small_card = FACTS.model_copy(update={"device_total_bytes": 40 * GIB})
    assert "moments" in advice("ActivationSpike", facts=small_card, missing=2 * GIB)
    assert "moments" not in advice("ActivationSpike", missing=2 * GIB), "less than a fiftieth of the card"
    lacked_more = advice("ActivationSpike", facts=small_card, missing=3 * GIB)
    assert "moments" not in lacked_more
    assert "policy.lora" in lacked_more
    assert advice("ActivationSpike", missing=20 * GIB) == ""


def test_a_state_in_host_memory_cannot_become_smaller_on_the_gpu() -> None:
    facts = FACTS.model_copy(update={"device_total_bytes": 40 * GIB})
    offloaded = advice("OptimizerState", facts=facts, offloaded=True)
    assert "moments" not in offloaded
    assert human_bytes(FACTS.trained_bytes - FACTS.adapter_policy_bytes) in offloaded


@pytest.mark.parametrize(
    "failure_class", sorted(set(FailureClass) - {"ActivationSpike", "ModelWeights", "OptimizerState"})
)
def test_other_causes_need_no_smaller_job(failure_class: str) -> None:
    assert advice(failure_class) == ""


def test_weights_alone_are_smaller_with_adapters_only() -> None:
    assert "policy.lora" in advice("ModelWeights")
    assert "moments" not in advice("ModelWeights")


def test_jobs_with_nothing_to_gain_get_no_such_advice() -> None:
    small = profile(QWEN3_0_6B, replace(SIXTEEN_GROUPS, moment_bytes=2))
    assert small.smaller_moments_bytes == 0
    assert "policy.lora" in advice("OptimizerState", facts=small)
    assert profile(ADAPTED).adapter_policy_bytes == 0
    assert advice("OptimizerState", facts=profile(ADAPTED)) == ""
    assert (
        advice("OptimizerState", facts=FACTS.model_copy(update={"trained_bytes": 0, "smaller_moments_bytes": 0})) == ""
    )
    assert advice("OptimizerState", facts=FACTS.model_copy(update={"device_total_bytes": 0})) == ""


def test_the_static_advice_names_the_same_settings() -> None:
    for failure_class in FailureClass:
        named = "policy.lora" in failure_class.advice
        assert named == (advice(failure_class) != ""), failure_class
        assert "policy.lora" not in failure_class.own_advice


def test_offload_frees_little_in_a_job_with_adapters() -> None:
    facts = profile(ADAPTED)
    plan = first_plan(MemorySettings(), H200, ADAPTED, SIXTEEN_GROUPS).model_copy(update={"optimizer_offload": False})
    assert facts.optimizer_bytes == 10 * ADAPTED.adapter_parameters < GIB // 4

    in_the_step = failure(diagnosis("OptimizerState", requested_bytes=GIB, free_bytes=0))
    changes, end = answers_to([in_the_step] * 20, plan, constraints(profile=facts, recovery={"maxAdjustments": 20}))
    assert "optimizerOffload" not in settings_in_order(changes), "its buckets would be as large as the state"
    assert "optimizerOffload" not in explanation_of(end)
    stuck = answer(in_the_step, plan, constraints(profile=facts, recovery=USED_UP))
    assert "Use more GPUs for the policy" in explanation_of(stuck)
    assert "optimizerOffload" not in explanation_of(stuck)

    spike = failure(diagnosis("ActivationSpike", requested_bytes=2 * GIB, free_bytes=0))
    changes, _ = answers_to([spike] * 20, plan, constraints(profile=facts, recovery={"maxAdjustments": 20}))
    order = settings_in_order(changes)
    assert order.index("activationCheckpointing") < order.index("optimizerOffload")
    (offload,) = [each.change.remedy for each in changes if each.change.remedy.setting == "optimizerOffload"]
    assert offload.expected_bytes == facts.optimizer_bytes
