"""Properties that hold for every plan, all constraints and every sequence of failures."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import Phase, Role
from rljob_api.recovery import RecoverySpec
from rljob_api.step_report import Evidence
from rljob_memory.budget import PHASES, Place, Setup, budget
from rljob_memory.diagnosis import FailureClass
from rljob_memory.hardware import Hardware
from rljob_memory.model_shape import ModelShape
from rljob_memory.plan_settings import is_pinned
from rljob_memory.recovery import Changed, Constraints, GiveUp, RecoveryState
from rljob_memory.recovery.constraints import LEVELS, PolicyGrowth
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.ladder import ladder_of
from rljob_memory.recovery.remedies import POLICY_GPUS, REMEDIES, remedies_for
from rljob_memory.recovery.state import NOT_OF_THE_PLAN, counts
from rljob_memory.sizes import MIB
from rljob_memory.workload import Workload
from tests.unit.memory.recovery.failures import PINNABLE, answer, dead_after, diagnosis, failure, settings_that_pin

MOST_CHANGES = 200
"""More than all settings of the plans have values to come to."""


_SIZES = st.integers(min_value=1, max_value=4_096).map(lambda number: number * MIB)

plans = st.fixed_dictionaries(
    {
        "generation": st.integers(min_value=1, max_value=9),
        "empty_cache": st.booleans(),
        "expandable_segments": st.booleans(),
        "rollout_sleep": st.sampled_from(("Disabled", "Level1", "Level2")),
        "kv_cache_bytes": _SIZES,
        "micro_batch_tokens": st.integers(min_value=1, max_value=16_384),
        "logprob_chunk_tokens": st.integers(min_value=1, max_value=8_192),
        "activation_checkpointing": st.booleans(),
        "optimizer_offload": st.booleans(),
        "sync_bucket_bytes": _SIZES,
        "detach_metrics": st.booleans(),
        "weight_export": st.sampled_from(("ReservedBuffer", "SwitchSegments")),
        "host_memory_bytes": st.none() | _SIZES,
        "shared_memory_bytes": st.none() | _SIZES,
        "excluded_nodes": st.sampled_from(([], ["gpu-7"])),
    }
).map(MemoryPlan.model_validate)

setups = st.builds(
    Setup,
    st.builds(
        Workload,
        prompts_per_step=st.integers(min_value=1, max_value=64),
        group_size=st.integers(min_value=2, max_value=16),
        max_prompt_tokens=st.integers(min_value=1, max_value=512),
        max_response_tokens=st.integers(min_value=1, max_value=2_048),
        policy_ranks=st.integers(min_value=1, max_value=4),
        topology=st.sampled_from(["Colocated", "Disaggregated"]),
    ),
    st.builds(
        ModelShape,
        parameters=st.integers(min_value=1, max_value=10**10),
        layers=st.integers(min_value=1, max_value=64),
        hidden=st.integers(min_value=16, max_value=8_192),
        kv_heads=st.integers(min_value=1, max_value=8),
        head_dim=st.integers(min_value=16, max_value=128),
        vocabulary=st.integers(min_value=16, max_value=160_000),
        bytes_per_parameter=st.sampled_from([2, 4]),
    ),
    st.builds(
        Hardware,
        device=st.just("cuda"),
        device_memory_bytes=_SIZES,
        host_memory_bytes=_SIZES,
        shared_memory_bytes=_SIZES,
    )
    | st.builds(
        Hardware,
        device=st.just("cpu"),
        device_memory_bytes=st.just(0),
        host_memory_bytes=_SIZES,
        shared_memory_bytes=_SIZES,
    ),
)

every_constraints = st.builds(
    Constraints,
    settings=st.sets(st.sampled_from(sorted(PINNABLE))).map(settings_that_pin),
    recovery=st.fixed_dictionaries(
        {
            "max_adjustments": st.just(100),
            "max_host_memory": st.none() | _SIZES,
            "max_shared_memory": st.none() | _SIZES,
        }
    ).map(RecoverySpec.model_validate),
    setup=st.none() | setups,
    levels=st.frozensets(st.sampled_from(LEVELS), min_size=1),
    supported_settings=st.none()
    | st.frozensets(st.sampled_from(["expandableSegments", "microBatchTokens", "kvCache"])),
    host_memory_limit_bytes=st.none() | _SIZES,
    predicted_host_memory_limit_bytes=st.none() | _SIZES,
    shared_memory_bytes=st.none() | _SIZES,
    node=st.sampled_from([None, "gpu-1", "gpu-7"]),
    growth=st.none()
    | st.builds(
        PolicyGrowth,
        ranks=st.just(1),
        larger=st.sampled_from([(), (2,), (2, 4)]),
        most=st.just(4),
        level=st.sampled_from(["RestartInPlace", "ReplacePods"]),
        room=st.sampled_from([None, 1, 2]),
    ),
)

_diagnoses = st.builds(
    lambda cause, numbers: diagnosis(cause, 0.5, **numbers),
    st.sampled_from([str(cause) for cause in FailureClass]),
    st.dictionaries(
        st.sampled_from(["requested_bytes", "free_bytes", "needed_bytes", "wanted_bytes", "policy_cache_bytes"]), _SIZES
    ),
)
evidences = st.builds(
    lambda found, role, phase: failure(*found, role=role, phase=phase),
    st.lists(_diagnoses, min_size=1, max_size=3),
    st.sampled_from(get_args(Role)),
    st.sampled_from([None, *get_args(Phase)]),
)


@settings(deadline=None, max_examples=60)
@given(plans, every_constraints, st.lists(evidences, min_size=1, max_size=4))
def test_every_sequence_of_failures_ends_and_no_plan_recurs(
    plan: MemoryPlan, bounds: Constraints, failures: list[Evidence]
) -> None:
    """Holds even if each attempt commits a step and restores its budget: the ladder itself must end."""
    seen = [_without_generation(plan)]
    state, given_up, number = RecoveryState(None, 1_000), 0, 0
    while given_up < len(failures):
        evidence = failures[number % len(failures)]
        number += 1
        assert number < MOST_CHANGES, "it does not end"
        decision = answer(evidence, plan, bounds, state)
        if not isinstance(decision, Changed):
            given_up += 1
            continue
        given_up, next_plan = 0, _without_generation(decision.plan)
        assert decision.change.remedy.setting in NOT_OF_THE_PLAN or next_plan not in seen
        seen.append(next_plan)
        state = replace(decision.state, adjustments=0, committed_step=evidence.step)
        plan = decision.plan


@settings(deadline=None, max_examples=150)
@given(plans, every_constraints, evidences)
def test_a_change_sets_one_unpinned_setting_and_those_that_it_brings(
    plan: MemoryPlan, bounds: Constraints, evidence: Evidence
) -> None:
    decision = answer(evidence, plan, bounds)
    if not isinstance(decision, Changed):
        return
    changed = {name for name in MemoryPlan.model_fields if getattr(decision.plan, name) != getattr(plan, name)}
    assert decision.plan.generation == plan.generation + 1
    remedies = [each for each in (*REMEDIES, POLICY_GPUS) if each.name == decision.change.remedy.setting]
    brought = {name: value for each in remedies for name, value in each.brings.items()}
    assert changed - {"generation", *brought} == {each.setting for each in remedies if each.of_the_plan}
    assert all(getattr(decision.plan, name) == brought[name] for name in changed & brought.keys())
    assert not any(is_pinned(bounds.settings, name) for name in changed)
    assert MemoryPlan.model_validate(decision.plan.model_dump()) == decision.plan, "it is a valid plan"
    assert decision.change.level in bounds.levels
    assert (decision.change.level == "Live") == (not decision.renew)
    of_the_trainer = {remedy.name for remedy in REMEDIES if remedy.owner is not None}
    assert bounds.supported_settings is None or decision.change.remedy.setting in bounds.supported_settings | (
        {remedy.name for remedy in REMEDIES} - of_the_trainer
    )


@settings(deadline=None, max_examples=150)
@given(plans, every_constraints, evidences)
def test_the_cause_is_answered_before_anything_else(plan: MemoryPlan, bounds: Constraints, evidence: Evidence) -> None:
    cause = evidence.diagnoses[0]
    failure_class = FailureClass(cause.class_name)
    decision = answer(evidence, plan, bounds)
    acting = {remedy.name for remedy in remedies_for(failure_class)}
    if isinstance(decision, Changed) and decision.change.remedy.setting not in acting:
        state, dead = RecoveryState(plan, 1_000), dead_after(evidence, bounds.setup)
        case = Case(failure_class, cause, evidence.role, evidence.phase, state, bounds, dead)
        assert not ladder_of(case).reachable, "it was passed over"
        assert not (ladder_of(case).rungs and bounds.is_supervised), "it is the supervisor's"


@settings(deadline=None, max_examples=150)
@given(plans, every_constraints, evidences)
def test_a_change_frees_at_most_the_difference_of_two_budgets(
    plan: MemoryPlan, bounds: Constraints, evidence: Evidence
) -> None:
    decision = answer(evidence, plan, bounds)
    by_excess = {remedy.name for remedy in REMEDIES if remedy.excess or remedy.present}
    if not isinstance(decision, Changed) or bounds.setup is None or decision.change.remedy.setting in by_excess:
        return
    if decision.plan.kv_cache_bytes > plan.kv_cache_bytes:
        return
    before, after = (budget(bounds.setup, each) for each in (plan, decision.plan))
    pods, expected = list(before.pods()), decision.change.remedy.expected_bytes
    freed = [
        sum(before.total(place, phase, pod=pod) - after.total(place, phase, pod=pod) for pod in pods)
        for place in get_args(Place)
        for phase in PHASES
    ]
    is_on_gpu = bounds.setup.hardware.device == "cuda"
    assert expected is None or 0 < expected <= max(freed)
    assert expected is not None or not is_on_gpu


@settings(deadline=None, max_examples=60)
@given(plans, every_constraints, evidences)
def test_the_same_question_has_the_same_answer(plan: MemoryPlan, bounds: Constraints, evidence: Evidence) -> None:
    the_same_plan = MemoryPlan.model_validate_json(plan.model_dump_json())
    the_same_constraints = replace(bounds, levels=frozenset(sorted(bounds.levels, reverse=True)))
    the_same_evidence = Evidence.model_validate_json(evidence.model_dump_json())
    again = answer(the_same_evidence, the_same_plan, the_same_constraints)
    assert answer(evidence, plan, bounds) == again


@settings(deadline=None, max_examples=40)
@given(plans, every_constraints, evidences, st.integers(min_value=0, max_value=5))
def test_the_budget_is_kept(plan: MemoryPlan, bounds: Constraints, evidence: Evidence, most: int) -> None:
    limited = replace(bounds, recovery=bounds.recovery.model_copy(update={"max_adjustments": most}))
    state = RecoveryState(plan, 1_000)
    while isinstance(decision := answer(evidence, plan, limited, state), Changed):
        state, plan = decision.state, decision.plan
    counted = sum(1 for change in state.changes if counts(change))
    assert counted <= most
    if not limited.is_supervised:
        exhausted = isinstance(decision, GiveUp) and decision.reason == "AdjustmentsExhausted"
        assert exhausted == (counted == most)


def _without_generation(plan: MemoryPlan) -> str:
    return plan.model_copy(update={"generation": 1}).model_dump_json()
