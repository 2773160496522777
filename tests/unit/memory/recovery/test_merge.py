"""A plan with two writers: the supervisor's state, merged with the changes that a trainer made by itself."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.plan_change import PlanChange, RemedyStatus
from rljob_memory.recovery import RecoveryState
from tests.unit.memory.recovery.failures import FIRST_PLAN, change_after, constraints, diagnosis, failure

SETTINGS = ("microBatchTokens", "detachMetrics", "hostMemoryBytes")


def change(generation: int, setting: str = SETTINGS[0], *, step: int = 5, seconds: float | None = None) -> PlanChange:
    made = change_after(failure(diagnosis("ActivationSpike"), step=step), FIRST_PLAN, constraints()).change
    remedy = RemedyStatus(setting=setting, before="2", after="1", observed_bytes=None if seconds is None else 7)
    return made.model_copy(update={"generation": generation, "remedy": remedy, "seconds_to_recover": seconds})


def state(*changes: PlanChange, generation: int = 1) -> RecoveryState:
    plan = FIRST_PLAN.model_copy(update={"generation": generation})
    return RecoveryState.replayed(plan, changes, committed_step=9, steps=100)


def test_the_trainers_newer_plan_is_adopted_with_its_changes() -> None:
    newer = FIRST_PLAN.model_copy(update={"generation": 3, "micro_batch_tokens": 1})
    merged = state().merge(newer, [change(2), change(3)])
    assert merged.plan == newer
    assert [each.generation for each in merged.changes] == [2, 3]
    assert (merged.adjustments, merged.committed_step) == (2, 9)


def test_the_settings_of_the_pods_stay_the_supervisors() -> None:
    given_by_operator = replace(state(), plan=FIRST_PLAN.model_copy(update={"excluded_nodes": ["gpu-1"]}))
    claimed = FIRST_PLAN.model_copy(update={"generation": 2, "host_memory_bytes": 1 << 40})
    merged = given_by_operator.merge(claimed, [change(2)])
    assert merged.plan is not None
    assert (merged.plan.excluded_nodes, merged.plan.host_memory_bytes) == (["gpu-1"], None)


def test_of_two_changes_of_one_generation_the_supervisors_wins() -> None:
    supervisors = state(change(2, "hostMemoryBytes"), generation=2)
    trainers = FIRST_PLAN.model_copy(update={"generation": 2, "micro_batch_tokens": 1})
    assert supervisors.merge(trainers, [change(2, "microBatchTokens", seconds=1.0)]) == supervisors


def test_only_the_effect_of_a_known_change_is_learned() -> None:
    supervisors = state(change(2), generation=2)
    [learned] = supervisors.merge(supervisors.plan, [change(2, step=99, seconds=3.5)]).changes
    assert (learned.seconds_to_recover, learned.remedy.observed_bytes, learned.step) == (3.5, 7, 5)


changes = st.builds(
    change,
    st.integers(min_value=2, max_value=6),
    st.sampled_from(SETTINGS),
    step=st.integers(min_value=1, max_value=20),
    seconds=st.none() | st.just(1.5),
)


@given(st.lists(changes, max_size=5), st.lists(changes, max_size=5), st.integers(1, 7), st.integers(1, 7))
def test_a_second_merge_of_the_same_report_changes_nothing(
    known: list[PlanChange], reported: list[PlanChange], generation: int, reported_generation: int
) -> None:
    own = {each.generation: each for each in known if each.generation <= generation}
    supervisors = state(*(own[number] for number in sorted(own)), generation=generation)
    plan = FIRST_PLAN.model_copy(update={"generation": reported_generation})
    merged = supervisors.merge(plan, reported)
    assert merged.merge(plan, reported) == merged
    generations = [each.generation for each in merged.changes]
    assert generations == sorted(set(generations)), "one change per generation, oldest first"
    assert merged.plan is not None
    assert merged.plan.generation == max(generation, reported_generation)
    assert merged.adjustments >= supervisors.adjustments
