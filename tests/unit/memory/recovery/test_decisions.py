"""Answers to failures: the changes, their order, levels and effects, and the explanations of giving up.

A line of `decisions.jsonl` has the `failure` (which recurs) or several `failures`, what differs from the first `plan`
and from the usual constraints, and what is expected: all the `changes` (`setting value level`) and the `end`, or
only the first changes without one, the bytes that the first one `frees`, the roles that it `renews`, settings that are
`never` or `sometime` changed, and parts that the explanation `says` or that it does not (`not_says`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest

from rljob_api.job import grown_spec
from rljob_api.memory_plan import MemoryPlan, MemorySettings
from rljob_api.plan_change import Phase, RemedyLevel, Role
from rljob_api.roles import ADAPTER_SETTINGS
from rljob_api.step_report import Evidence, RankMemory
from rljob_memory.budget import Setup
from rljob_memory.diagnosis import FailureClass
from rljob_memory.model_shape import with_adapters
from rljob_memory.plan import first_plan
from rljob_memory.recovery import Changed, Constraints, GiveUp, RecoveryState
from rljob_memory.recovery.constraints import policy_growth
from rljob_memory.sizes import GIB, MIB
from tests.unit.memory.diagnosis.recorded import in_bytes, json_lines
from tests.unit.memory.recovery.failures import (
    ALL_OFF,
    EVERY_LEVEL,
    FIRST_PLAN,
    IN_THE_OPERATOR,
    IN_THE_TRAINER,
    ON_ONE_MACHINE,
    PINNABLE,
    QWEN3_0_6B,
    SETUP,
    answer,
    answers_to,
    change_after,
    constraints,
    diagnosis,
    explanation_of,
    failure,
    growing_job,
    settings_in_order,
    settings_that_pin,
)

DECISIONS = json_lines(Path(__file__).with_name("decisions.jsonl"))
FIELDS = {
    *("about", "failure", "failures", "plan", "levels", "setup", "memory", "recovery", "pinned_but", "supported"),
    *("growth", "pod", "changes", "frees", "renews", "never", "sometime", "end", "says", "not_says"),
}
LEVELS = {None: EVERY_LEVEL, "trainer": IN_THE_TRAINER, "operator": IN_THE_OPERATOR, "machine": ON_ONE_MACHINE}


def evidence_of(of: dict[str, Any]) -> Evidence:
    causes = [diagnosis(name, **in_bytes(numbers)) for name, numbers in of["causes"].items()]
    memory = RankMemory(role="policy", rank=0, **in_bytes(of["memory"])) if "memory" in of else None
    role, phase = of.get("role", "policy"), of.get("phase", "update")
    return failure(*causes, role=role, phase=phase, message=of.get("message", ""), memory=memory)


def setup_with(facts: dict[str, Any]) -> Setup:
    """The usual setup with other values of any of its parts."""

    def changed(part: Any) -> Any:
        return replace(part, **{name: value for name, value in facts.items() if name in part.__dataclass_fields__})

    return Setup(changed(SETUP.work), changed(SETUP.model), changed(SETUP.hardware))


def constraints_of(case: dict[str, Any], plan: MemoryPlan) -> Constraints:
    levels, facts, growth = LEVELS[case.get("levels")], case.get("setup", {}), case.get("growth")
    given = constraints(
        levels,
        setup=None if facts is None else setup_with(in_bytes(facts)),
        memory=case.get("memory"),
        recovery=case.get("recovery"),
    )
    if "pinned_but" in case:
        given = replace(given, settings=settings_that_pin(PINNABLE - set(case["pinned_but"])))
    if "supported" in case:
        given = replace(given, supported_settings=frozenset(case["supported"]))
    if growth:
        job = grown_spec(growing_job(growth["most"]), plan)
        level: RemedyLevel = "ReplacePods" if "ReplacePods" in levels else "RestartInPlace"
        given = replace(given, growth=policy_growth(job, level, room=growth.get("room")))
    return replace(given, **in_bytes(case.get("pod", {})))


@pytest.mark.parametrize("case", DECISIONS, ids=lambda case: case["about"])
def test_a_failure_is_answered_as_recorded(case: dict[str, Any]) -> None:
    assert case.keys() <= FIELDS
    plan = FIRST_PLAN.model_copy(update=in_bytes(case.get("plan", {})))
    failures: Iterable[Evidence]
    failures = map(evidence_of, case["failures"]) if "failures" in case else repeat(evidence_of(case["failure"]), 30)
    expected = case.get("changes")
    if expected is not None and "end" not in case:
        failures = islice(failures, len(expected))
    found, end = answers_to(failures, plan, constraints_of(case, plan))
    remedies = [(each.change.remedy, each.change.level) for each in found]
    settings = settings_in_order(found)
    assert expected in (None, [f"{made.setting} {made.after} {level}" for made, level in remedies])
    assert case.get("frees") in (None, *(made.expected_bytes for made, _ in remedies[:1]))
    assert "renews" not in case or found[0].renew == set(case["renews"])
    assert not set(case.get("never", [])) & set(settings)
    assert set(case.get("sometime", [])) <= set(settings)
    if "end" in case:
        assert (end.reason if isinstance(end, GiveUp) else type(end).__name__) == case["end"]
        explanation = explanation_of(end)
        assert [part for part in case.get("says", []) if part not in explanation] == []
        assert [part for part in case.get("not_says", []) if part in explanation] == []


# --- answers to many failures ---

SPIKE = failure(diagnosis("ActivationSpike", requested_bytes=2 * GIB, free_bytes=0), step=41)
OF_COLOCATION = {"rolloutSleep", "emptyCache", "weightExport"}
OF_THE_OTHER_GPU = {
    "rollout": {"optimizerOffload", "expandableSegments", "activationCheckpointing", "microBatchTokens"},
    "policy": {"kvCache"},
}


@pytest.mark.parametrize(
    ("role", "phase"),
    [("rollout", None), ("rollout", "rollout"), ("rollout", "sync"), ("policy", "update"), ("policy", "sync")],
)
def test_no_change_frees_memory_of_another_gpu(role: Role, phase: Phase | None) -> None:
    """The policy and the engines have GPUs of their own."""
    apart = SETUP.with_work(topology="Disaggregated")
    for cause in FailureClass:
        evidence = failure(diagnosis(str(cause), requested_bytes=2 * GIB), role=role, phase=phase)
        found, _ = answers_to(repeat(evidence, 30), ALL_OFF, constraints(setup=apart))
        assert not (OF_COLOCATION | OF_THE_OTHER_GPU[role]) & set(settings_in_order(found)), cause


def test_another_trainer_gets_the_settings_of_its_adapter() -> None:
    """It reports no phase of its own, and the size of its state is unknown."""
    other = constraints(setup=None, supported_settings=ADAPTER_SETTINGS["Verl"], recovery={"maxAdjustments": 50})
    plan = FIRST_PLAN.model_copy(update={"sync_bucket_bytes": GIB, "rollout_sleep": "Disabled"})
    phases: tuple[Phase | None, ...] = (None, "update")
    for phase in phases:
        spike = failure(diagnosis("WeightSyncSpike"), phase=phase)
        found, _ = answers_to(repeat(spike, 30), plan, other, committed_each_time=1)
        assert [each.plan.sync_bucket_bytes // MIB for each in found][:4] == [512, 256, 128, 128]
        assert "optimizerOffload" in settings_in_order(found)
    found, _ = answers_to(repeat(failure(diagnosis("OptimizerState")), 30), plan, other, committed_each_time=1)
    assert not {"optimizerOffload", "syncBucketSize"} & set(settings_in_order(found)), "an update has the state"


def test_offload_frees_little_in_a_job_with_adapters() -> None:
    adapted = replace(SETUP, model=with_adapters(QWEN3_0_6B, 16))
    plan = first_plan(MemorySettings(), adapted).model_copy(update={"optimizer_offload": False})
    state = 10 * adapted.model.adapter_parameters
    assert state < GIB // 4

    in_the_step = failure(diagnosis("OptimizerState", requested_bytes=GIB, free_bytes=0))
    for most in (20, 0):
        given = constraints(setup=adapted, recovery={"maxAdjustments": most})
        found, end = answers_to([in_the_step] * 20, plan, given)
        assert "optimizerOffload" not in settings_in_order(found), "its buckets would be as large as the state"
        assert "optimizerOffload" not in explanation_of(end)
    assert "Use more GPUs for the policy" in explanation_of(end)

    found, _ = answers_to([SPIKE] * 20, plan, constraints(setup=adapted, recovery={"maxAdjustments": 20}))
    order = settings_in_order(found)
    assert order.index("activationCheckpointing") < order.index("optimizerOffload")
    [offload] = [each.change.remedy for each in found if each.change.remedy.setting == "optimizerOffload"]
    assert offload.expected_bytes == state


def test_the_smallest_kv_cache_is_that_of_the_engines_of_the_plan() -> None:
    """One sequence of 16,000 tokens, of which each GPU of an engine has its KV heads."""
    setup = SETUP.with_work(engines=4, policy_ranks=4, max_response_tokens=16_000, auto_engines=True)
    sizes = []
    for size in (1, 2):
        plan = FIRST_PLAN.model_copy(update={"tensor_parallel_size": size})
        too_large = failure(diagnosis("KVCacheOversized"), role="rollout", phase="rollout")
        found, _ = answers_to([too_large] * 60, plan, constraints(setup=setup, recovery={"maxAdjustments": 100}))
        sizes.append(min(each.plan.kv_cache_bytes for each in found))
        assert {each.plan.tensor_parallel_size for each in found} == {size}
    assert sizes[1] < 0.6 * sizes[0]


def test_growth_counts_against_max_gpus_alone() -> None:
    growth = policy_growth(growing_job(), "ReplacePods")
    response = answer(
        failure(diagnosis("OptimizerState"), phase=None),
        FIRST_PLAN.model_copy(update={"policy_copies": 2}),
        constraints(IN_THE_OPERATOR, growth=growth, recovery={"maxAdjustments": 0}),
    )
    assert isinstance(response, Changed)
    assert response.plan.policy_copies == 1, "the copies need not divide the new number"
    assert response.state.adjustments == 0
    assert "policyGpus 1 → 2 (generation 2, expected to free" in response.message
    assert "adjustment" not in response.message


# --- giving up ---


def test_the_static_advice_names_the_same_settings() -> None:
    used_up = constraints(recovery={"maxAdjustments": 0})
    for cause in FailureClass:
        evidence = failure(diagnosis(str(cause), requested_bytes=1, free_bytes=0))
        is_advised = "Another job would" in explanation_of(answer(evidence, FIRST_PLAN, used_up))
        assert ("policy.lora" in cause.advice) == is_advised, cause
        assert "policy.lora" not in cause.own_advice


def test_the_explanation_names_every_change_with_its_effect() -> None:
    remedies, _ = answers_to([SPIKE] * 2, FIRST_PLAN, constraints(IN_THE_OPERATOR))
    first, second = (each.change for each in remedies)
    seen = first.model_copy(update={"remedy": first.remedy.model_copy(update={"observed_bytes": 3 * GIB})})
    given = constraints(IN_THE_OPERATOR, recovery={"maxAdjustments": 2})
    state = RecoveryState(None, 1_000, (seen, second), adjustments=2, committed_step=40)
    end = answer(SPIKE, remedies[-1].plan, given, state)
    assert isinstance(end, GiveUp)
    assert end.reason == "AdjustmentsExhausted"
    for advice in ("recovery.maxAdjustments is 2", "Raise recovery.maxAdjustments", "Lower memory.microBatchTokens"):
        assert advice in end.explanation
    first_line, second_line = end.explanation.partition("Tried: ")[2].split(";")[:2]
    assert first_line.startswith("generation 2 (step 41, update, ActivationSpike): microBatchTokens 16384 → 8192")
    assert first_line.endswith("observed 3.00 GiB")
    assert "generation 3" in second_line
    assert "failed again" in second_line


def test_the_longest_explanation_fits_a_condition() -> None:
    changes = (change_after(SPIKE, FIRST_PLAN, constraints()).change,) * 20
    end = answer(SPIKE, FIRST_PLAN, constraints(), RecoveryState(None, 1_000, changes, adjustments=6))
    assert isinstance(end, GiveUp)
    assert len(end.explanation) < 8_000


def test_a_loop_without_a_step_ends_however_large_the_budget_is() -> None:
    short = SETUP.with_work(max_prompt_tokens=2, max_response_tokens=2, group_size=4096)
    given = constraints(setup=short, recovery={"maxAdjustments": 100})
    found, end = answers_to(repeat(SPIKE, 99), FIRST_PLAN, given)
    assert len(found) == 10
    assert isinstance(end, GiveUp)
    assert end.reason == "NoProgress"
    found, end = answers_to(repeat(SPIKE, 99), FIRST_PLAN, given, committed_each_time=50)
    assert len(found) > 10
    assert "No change of the memory plan is left" in explanation_of(end), "with progress it ends only then"


@pytest.mark.parametrize(("pinned", "releases"), [("Auto", True), ("Disabled", False)])
def test_an_engine_that_sleeps_from_now_on_gets_the_policys_cache(pinned: str, releases: bool) -> None:
    awake = first_plan(MemorySettings(), SETUP)
    assert (awake.rollout_sleep, awake.empty_cache) == ("Disabled", False)
    given = constraints(memory={"emptyCache": pinned})
    changed = change_after(failure(diagnosis("EngineNotAsleep")), awake, given).plan
    assert (changed.rollout_sleep, changed.empty_cache) == ("Level2", releases)
