"""Properties that hold for every plan, all constraints and every sequence of failures."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.memory_plan import MemoryPlan
from rljob_api.step_report import Evidence
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery import Changed, Constraints, GiveUp, RecoveryState
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.families import FAMILIES
from rljob_memory.recovery.ladder import families_for, ladder_of
from rljob_memory.recovery.pins import is_pinned
from rljob_memory.recovery.state import NOT_OF_THE_PLAN, counts
from tests.unit.memory.recovery.failures import answer, dead_after
from tests.unit.memory.recovery.questions import every_constraints, evidences, plans

MOST_CHANGES = 200
"""More than all settings of the plans have values to come to."""


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
def test_a_change_sets_one_unpinned_setting_and_the_generation(
    plan: MemoryPlan, bounds: Constraints, evidence: Evidence
) -> None:
    decision = answer(evidence, plan, bounds)
    if not isinstance(decision, Changed):
        return
    changed = {name for name in MemoryPlan.model_fields if getattr(decision.plan, name) != getattr(plan, name)}
    assert decision.plan.generation == plan.generation + 1
    assert len(changed - {"generation"}) == (0 if decision.change.remedy.setting in NOT_OF_THE_PLAN else 1)
    assert not any(is_pinned(bounds.settings, name) for name in changed)
    assert MemoryPlan.model_validate(decision.plan.model_dump()) == decision.plan, "it is a valid plan"
    assert decision.change.level in bounds.levels
    assert (decision.change.level == "Live") == (not decision.renew)
    of_the_trainer = {family.name for family in FAMILIES if family.owner is not None}
    assert bounds.supported_settings is None or decision.change.remedy.setting in bounds.supported_settings | (
        {family.name for family in FAMILIES} - of_the_trainer
    )


@settings(deadline=None, max_examples=150)
@given(plans, every_constraints, evidences)
def test_the_cause_is_answered_before_anything_else(plan: MemoryPlan, bounds: Constraints, evidence: Evidence) -> None:
    cause = evidence.diagnoses[0]
    failure_class = FailureClass(cause.class_name)
    decision = answer(evidence, plan, bounds)
    acting = {family.name for family in families_for(failure_class)}
    if isinstance(decision, Changed) and decision.change.remedy.setting not in acting:
        state, dead = RecoveryState(plan, 1_000), dead_after(evidence, bounds.profile)
        case = Case(failure_class, cause, evidence.role, evidence.phase, state, bounds, dead)
        assert not ladder_of(case).reachable, "it was passed over"
        assert not (ladder_of(case).rungs and bounds.is_supervised), "it is the supervisor's"


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
