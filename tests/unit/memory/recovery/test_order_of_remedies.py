"""The order and the level of changes, and changes that are never tried."""

from __future__ import annotations

from itertools import repeat

import pytest

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_api.plan_change import Phase, RemedyLevel, Role
from rljob_api.step_report import RankMemory
from rljob_memory.recovery import Constraints, GiveUp
from rljob_memory.sizes import GIB
from tests.unit.memory.recovery.failures import (
    ALL_OFF,
    FACTS,
    FIRST_PLAN,
    FOUR_RANKS,
    FRAGMENTED,
    IN_THE_OPERATOR,
    IN_THE_TRAINER,
    ON_A_CPU,
    answer,
    answers_to,
    change_after,
    constraints,
    diagnosis,
    explanation_of,
    failure,
    settings_in_order,
)


def test_of_one_level_the_change_that_covers_the_need_is_taken() -> None:
    """Fewer logits at a time would free 0.6 GiB, which is less than the 5 GiB that were missing."""
    logits = FIRST_PLAN.logprob_chunk_tokens * 4 * 151_936
    spike = failure(diagnosis("ActivationSpike", requested_bytes=logits, free_bytes=0))
    assert change_after(spike, FIRST_PLAN, constraints()).change.remedy.setting == "logprobChunkTokens"
    more = spike.model_copy(
        update={
            "diagnoses": [diagnosis("ActivationSpike", requested_bytes=5 * GIB)],
            "message": "logits.float()\nlog_softmax(",
        }
    )
    assert change_after(more, FIRST_PLAN, constraints()).change.remedy.setting == "microBatchTokens"


def test_a_cheaper_level_goes_before_a_larger_effect() -> None:
    spike = failure(diagnosis("ActivationSpike", requested_bytes=60 * GIB, free_bytes=0))
    live = change_after(spike, FIRST_PLAN, constraints())
    assert (live.change.remedy.setting, live.change.level) == ("microBatchTokens", "Live")
    restarted = change_after(spike, FIRST_PLAN, constraints(IN_THE_OPERATOR))
    assert (restarted.change.remedy.setting, restarted.change.level) == ("activationCheckpointing", "RestartInPlace")


@pytest.mark.parametrize(
    ("role", "phase", "profile", "level", "respawn"),
    [
        ("policy", "update", FACTS, "Live", set()),
        ("policy", "update", FOUR_RANKS, "RespawnRole", {"policy"}),
        ("policy", "update", None, "RespawnRole", {"policy"}),
        ("policy", None, FACTS, "RespawnRole", {"policy"}),
        ("rollout", "sync", FACTS, "RespawnRole", {"rollout"}),
        ("rollout", "sync", FOUR_RANKS, "RespawnRole", {"policy", "rollout"}),
    ],
)
def test_the_level_follows_from_the_dead_roles(
    role: Role, phase: Phase | None, profile: MemoryProfile | None, level: RemedyLevel, respawn: set[Role]
) -> None:
    evidence = failure(diagnosis("Fragmentation" if role == "policy" else "AllocatorCache"), role=role, phase=phase)
    given = constraints(IN_THE_TRAINER, profile=profile)
    remedy = change_after(evidence, ALL_OFF, given)
    assert (remedy.change.level, set(remedy.renew)) == (level, respawn)


def test_partly_written_parameters_are_never_retried_live() -> None:
    in_the_optimizer = failure(diagnosis("OptimizerState", 0.4), diagnosis("ActivationSpike", 0.3))
    remedies, _ = answers_to(repeat(in_the_optimizer, 5), FIRST_PLAN, constraints(IN_THE_TRAINER))
    assert {remedy.change.level for remedy in remedies} == {"RespawnRole"}


def test_no_plan_is_tried_twice() -> None:
    """The optimizer's state was offloaded because it did not fit the GPU, and is not moved back."""
    state = failure(diagnosis("OptimizerState"))
    memory = RankMemory(role="policy", rank=0, device_free_bytes=90 * GIB, device_total_bytes=140 * GIB)
    killed = failure(diagnosis("HostMemory"), memory=memory)
    remedies, end = answers_to([state, killed], FIRST_PLAN, constraints())
    assert settings_in_order(remedies) == ["optimizerOffload"]
    assert end is not None


def test_the_trainer_leaves_higher_levels_to_its_supervisor() -> None:
    """The trainer could shrink micro-batches itself, but that would not act on the cause."""
    stranger = failure(diagnosis("ForeignProcess"), diagnosis("ActivationSpike", 0.4))
    decision = answer(stranger, FIRST_PLAN, constraints(IN_THE_TRAINER))
    assert isinstance(decision, GiveUp)
    assert decision.reason == "LeftToSupervisor"
    assert "processes would help" in decision.explanation


def test_the_second_cause_follows_if_nothing_is_left_for_the_first() -> None:
    evidence = failure(diagnosis("RetainedGraph"), diagnosis("KVCacheOversized", 0.5), phase="checkpoint")
    remedy = change_after(evidence, FIRST_PLAN, constraints())
    assert remedy.change.remedy.setting == "kvCache"
    assert remedy.change.diagnosis.class_name == "KVCacheOversized"


def test_every_setting_that_frees_memory_is_tried_last() -> None:
    evidence = failure(diagnosis("RetainedGraph"))
    remedy = change_after(evidence, FIRST_PLAN, constraints())
    assert remedy.change.remedy.setting == "microBatchTokens"
    assert remedy.change.diagnosis.class_name == "RetainedGraph"


def test_a_class_of_a_later_version_takes_the_generic_ladder() -> None:
    evidence = failure(diagnosis("SomethingNew"))
    assert change_after(evidence, FIRST_PLAN, constraints()).change.remedy.setting == "microBatchTokens"


@pytest.mark.parametrize(
    ("plan", "given", "setting"),
    [
        (ALL_OFF, constraints(profile=FACTS.model_copy(update={"colocated": False})), "rolloutSleep"),
        (ALL_OFF, constraints(profile=ON_A_CPU), "expandableSegments"),
        (ALL_OFF, constraints(profile=ON_A_CPU), "emptyCache"),
        (FIRST_PLAN, constraints(profile=FACTS.model_copy(update={"colocated": False})), "kvCache"),
    ],
)
def test_a_setting_without_effect_is_not_tried(plan: MemoryPlan, given: Constraints, setting: str) -> None:
    for cause in ("EngineNotAsleep", "Fragmentation", "ActivationSpike", "Unknown"):
        remedies, _ = answers_to(repeat(failure(diagnosis(cause)), 9), plan, given)
        assert setting not in settings_in_order(remedies)


def test_another_trainer_gets_supported_settings_and_pod_resources() -> None:
    given = constraints(
        IN_THE_OPERATOR,
        profile=None,
        supported_settings=frozenset({"expandableSegments"}),
        host_memory_limit_bytes=4 * GIB,
        recovery={"maxHostMemory": "8Gi"},
    )
    remedies, end = answers_to(repeat(failure(FRAGMENTED), 9), ALL_OFF, given)
    assert settings_in_order(remedies) == ["expandableSegments"]
    assert end is not None
    assert "microBatchTokens would help: make the trainer read it" in explanation_of(end)
    assert "kvCache" not in explanation_of(end), "it cannot be a supported setting"
    killed = change_after(failure(diagnosis("HostMemory")), ALL_OFF, given)
    assert killed.plan.host_memory_bytes == 6 * GIB
