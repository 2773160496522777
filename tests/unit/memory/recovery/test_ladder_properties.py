"""What holds for every plan, every latitude and every sequence of failures."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.memory_plan import MemoryPlan
from rljob_api.step_report import Evidence
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery import GiveUp, History, Latitude, Remedy, decide, with_change
from rljob_memory.recovery.case import Case
from rljob_memory.recovery.families import FAMILIES
from rljob_memory.recovery.ladder import families_for, ladder_of
from rljob_memory.recovery.pins import is_pinned
from tests.unit.memory.recovery.failures import change_of
from tests.unit.memory.recovery.questions import evidences, latitudes, plans

MOST_CHANGES = 200
"""More than all settings of the plans have values to come to."""


@settings(deadline=None, max_examples=60)
@given(plans, latitudes, st.lists(evidences, min_size=1, max_size=4))
def test_every_sequence_of_failures_ends_and_no_plan_comes_back(
    plan: MemoryPlan, latitude: Latitude, failures: list[Evidence]
) -> None:
    """Even where each attempt commits a step and gives back what it cost: what has to end it is the ladder itself."""
    seen = [_without_generation(plan)]
    history, given_up, number = History(), 0, 0
    while given_up < len(failures):
        evidence = failures[number % len(failures)]
        number += 1
        assert number < MOST_CHANGES, "it goes on and on"
        decision = decide(evidence, plan, history, latitude)
        if isinstance(decision, GiveUp):
            given_up += 1
            continue
        given_up, next_plan = 0, _without_generation(decision.plan)
        assert decision.status.setting == "processes" or next_plan not in seen
        seen.append(next_plan)
        history = with_change(history, change_of(evidence, decision), steps=1_000)
        history = replace(history, adjustments=0, committed_step=evidence.step)
        plan = decision.plan


@settings(deadline=None, max_examples=150)
@given(plans, latitudes, evidences)
def test_a_remedy_changes_one_setting_that_is_free_and_counts_the_generation(
    plan: MemoryPlan, latitude: Latitude, evidence: Evidence
) -> None:
    decision = decide(evidence, plan, History(), latitude)
    if isinstance(decision, GiveUp):
        return
    changed = {name for name in MemoryPlan.model_fields if getattr(decision.plan, name) != getattr(plan, name)}
    assert decision.plan.generation == plan.generation + 1
    assert len(changed - {"generation"}) == (0 if decision.status.setting == "processes" else 1)
    assert not any(is_pinned(latitude.settings, name) for name in changed)
    assert MemoryPlan.model_validate(decision.plan.model_dump()) == decision.plan, "it is a valid plan"
    assert decision.level in latitude.levels
    assert (decision.level == "Live") == (not decision.respawn)
    of_the_trainer = {family.name for family in FAMILIES if family.owner is not None}
    assert latitude.supported_settings is None or decision.status.setting in latitude.supported_settings | (
        {family.name for family in FAMILIES} - of_the_trainer
    )


@settings(deadline=None, max_examples=150)
@given(plans, latitudes, evidences)
def test_nothing_is_tried_beside_the_cause_while_something_acts_on_it(
    plan: MemoryPlan, latitude: Latitude, evidence: Evidence
) -> None:
    cause, history = evidence.diagnoses[0], History()
    failure_class = FailureClass(cause.class_name)
    decision = decide(evidence, plan, history, latitude)
    acting = {family.name for family in families_for(failure_class)}
    if isinstance(decision, Remedy) and decision.status.setting not in acting:
        causes = frozenset({failure_class})
        case = Case(failure_class, cause, causes, evidence.role, evidence.phase, plan, history, latitude)
        assert not ladder_of(case).reachable, "it was passed over"
        assert not (ladder_of(case).rungs and latitude.supervised), "it is the supervisor's"


@settings(deadline=None, max_examples=60)
@given(plans, latitudes, evidences)
def test_the_same_question_has_the_same_answer(plan: MemoryPlan, latitude: Latitude, evidence: Evidence) -> None:
    the_same_plan = MemoryPlan.model_validate_json(plan.model_dump_json())
    the_same_latitude = replace(latitude, levels=frozenset(sorted(latitude.levels, reverse=True)))
    the_same_evidence = Evidence.model_validate_json(evidence.model_dump_json())
    again = decide(the_same_evidence, the_same_plan, History(), the_same_latitude)
    assert decide(evidence, plan, History(), latitude) == again


@settings(deadline=None, max_examples=40)
@given(plans, latitudes, evidences, st.integers(min_value=0, max_value=5))
def test_the_budget_is_kept(plan: MemoryPlan, latitude: Latitude, evidence: Evidence, most: int) -> None:
    limited = replace(latitude, recovery=latitude.recovery.model_copy(update={"max_adjustments": most}))
    history = History()
    while isinstance(decision := decide(evidence, plan, history, limited), Remedy):
        history = with_change(history, change_of(evidence, decision), steps=1_000)
        plan = decision.plan
    assert len(history.changes) <= most
    assert (decision.reason == "AdjustmentsExhausted") == (len(history.changes) == most)


def _without_generation(plan: MemoryPlan) -> str:
    return plan.model_copy(update={"generation": 1}).model_dump_json()
