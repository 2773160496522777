"""In which order changes are tried, on which level, and what is never tried."""

from __future__ import annotations

from itertools import repeat

import pytest

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_api.plan_change import Phase, RemedyLevel, Role
from rljob_api.step_report import RankMemory
from rljob_memory.estimate import GIB
from rljob_memory.recovery import GiveUp, Latitude, decide
from tests.unit.memory.recovery.failures import (
    ALL_OFF,
    FACTS,
    FIRST_PLAN,
    FOUR_RANKS,
    FRAGMENTED,
    IN_THE_OPERATOR,
    IN_THE_TRAINER,
    NOTHING_YET,
    ON_A_CPU,
    diagnosis,
    failure,
    latitude,
    remedies_of,
    settings_in_order,
    the_remedy,
)


def test_of_one_level_the_change_that_covers_the_need_is_taken() -> None:
    """Fewer logits at a time would free 0.6 GiB, which is less than the 5 GiB that were missing."""
    logits = FIRST_PLAN.logprob_chunk_tokens * 4 * 151_936
    spike = failure(diagnosis("ActivationSpike", requested_bytes=logits, free_bytes=0))
    assert the_remedy(decide(spike, FIRST_PLAN, NOTHING_YET, latitude())).status.setting == "logprobChunkTokens"
    more = spike.model_copy(
        update={
            "diagnoses": [diagnosis("ActivationSpike", requested_bytes=5 * GIB)],
            "message": "logits.float()\nlog_softmax(",
        }
    )
    assert the_remedy(decide(more, FIRST_PLAN, NOTHING_YET, latitude())).status.setting == "microBatchTokens"


def test_a_cheaper_level_goes_before_a_larger_effect() -> None:
    spike = failure(diagnosis("ActivationSpike", requested_bytes=60 * GIB, free_bytes=0))
    live = the_remedy(decide(spike, FIRST_PLAN, NOTHING_YET, latitude()))
    assert (live.status.setting, live.level) == ("microBatchTokens", "Live")
    restarted = the_remedy(decide(spike, FIRST_PLAN, NOTHING_YET, latitude(IN_THE_OPERATOR)))
    assert (restarted.status.setting, restarted.level) == ("activationCheckpointing", "RestartInPlace")


@pytest.mark.parametrize(
    ("role", "phase", "facts", "level", "respawn"),
    [
        ("policy", "update", FACTS, "Live", set()),
        ("policy", "update", FOUR_RANKS, "RespawnRole", {"policy"}),
        ("policy", "update", None, "RespawnRole", {"policy"}),
        ("policy", None, FACTS, "RespawnRole", {"policy"}),
        ("rollout", "sync", FACTS, "RespawnRole", {"rollout"}),
        ("rollout", "sync", FOUR_RANKS, "RespawnRole", {"policy", "rollout"}),
    ],
)
def test_the_level_follows_from_who_failed(
    role: Role, phase: Phase | None, facts: MemoryProfile | None, level: RemedyLevel, respawn: set[Role]
) -> None:
    evidence = failure(diagnosis("Fragmentation" if role == "policy" else "AllocatorCache"), role=role, phase=phase)
    given = latitude(IN_THE_TRAINER, facts=facts)
    remedy = the_remedy(decide(evidence, ALL_OFF, NOTHING_YET, given))
    assert (remedy.level, set(remedy.respawn)) == (level, respawn)


def test_half_written_parameters_are_never_retried_live() -> None:
    in_the_optimizer = failure(diagnosis("OptimizerState", 0.4), diagnosis("ActivationSpike", 0.3))
    remedies, _ = remedies_of(repeat(in_the_optimizer, 5), FIRST_PLAN, latitude(IN_THE_TRAINER))
    assert {remedy.level for remedy in remedies} == {"RespawnRole"}


def test_no_plan_is_tried_twice() -> None:
    """The optimizer's state was put on the host since it did not fit the GPU: it does not come back."""
    state = failure(diagnosis("OptimizerState"))
    memory = RankMemory(role="policy", rank=0, device_free_bytes=90 * GIB, device_total_bytes=140 * GIB)
    killed = failure(diagnosis("HostMemory"), memory=memory)
    remedies, end = remedies_of([state, killed], FIRST_PLAN, latitude())
    assert settings_in_order(remedies) == ["optimizerOffload"]
    assert end is not None


def test_what_is_beyond_the_trainer_is_left_to_its_supervisor() -> None:
    """Smaller micro-batches would be within its reach, and would not act on the cause."""
    stranger = failure(diagnosis("ForeignProcess"), diagnosis("ActivationSpike", 0.4))
    decision = decide(stranger, FIRST_PLAN, NOTHING_YET, latitude(IN_THE_TRAINER))
    assert isinstance(decision, GiveUp)
    assert decision.reason == "LeftToSupervisor"
    assert "fresh processes" in decision.sentence


def test_the_second_cause_is_asked_when_nothing_is_left_for_the_first() -> None:
    evidence = failure(diagnosis("RetainedGraph"), diagnosis("KVCacheOversized", 0.5), phase="sync")
    remedy = the_remedy(decide(evidence, FIRST_PLAN, NOTHING_YET, latitude()))
    assert remedy.status.setting == "kvCacheBytes"
    assert remedy.diagnosis.class_name == "KVCacheOversized"


def test_at_last_whatever_frees_memory_is_tried_and_the_cause_is_still_named() -> None:
    evidence = failure(diagnosis("RetainedGraph"))
    remedy = the_remedy(decide(evidence, FIRST_PLAN, NOTHING_YET, latitude()))
    assert remedy.status.setting == "microBatchTokens"
    assert remedy.diagnosis.class_name == "RetainedGraph"


def test_a_class_of_a_later_version_takes_the_generic_ladder() -> None:
    evidence = failure(diagnosis("SomethingNew"))
    assert the_remedy(decide(evidence, FIRST_PLAN, NOTHING_YET, latitude())).status.setting == "microBatchTokens"


@pytest.mark.parametrize(
    ("plan", "given", "setting"),
    [
        (ALL_OFF, latitude(facts=FACTS.model_copy(update={"colocated": False})), "rolloutSleepLevel"),
        (ALL_OFF, latitude(facts=ON_A_CPU), "expandableSegments"),
        (ALL_OFF, latitude(facts=ON_A_CPU), "emptyCache"),
        (FIRST_PLAN, latitude(facts=FACTS.model_copy(update={"colocated": False})), "kvCacheBytes"),
    ],
)
def test_a_setting_that_does_nothing_in_this_job_is_not_tried(plan: MemoryPlan, given: Latitude, setting: str) -> None:
    for cause in ("EngineNotAsleep", "Fragmentation", "ActivationSpike", "Unknown"):
        remedies, _ = remedies_of(repeat(failure(diagnosis(cause)), 9), plan, given)
        assert setting not in settings_in_order(remedies)


def test_another_trainer_is_given_only_supported_settings_and_its_pods_resources() -> None:
    given = latitude(
        IN_THE_OPERATOR,
        facts=None,
        supported_settings=frozenset({"expandableSegments"}),
        host_memory_limit_bytes=4 * GIB,
        recovery={"maxHostMemory": "8Gi"},
    )
    remedies, end = remedies_of(repeat(failure(FRAGMENTED), 9), ALL_OFF, given)
    assert settings_in_order(remedies) == ["expandableSegments"]
    assert end is not None
    assert "microBatchTokens would act: make the trainer read it" in end.sentence
    assert "kvCacheBytes" not in end.sentence, "it cannot be a supported setting"
    killed = the_remedy(decide(failure(diagnosis("HostMemory")), ALL_OFF, NOTHING_YET, given))
    assert killed.plan.host_memory_bytes == 6 * GIB
