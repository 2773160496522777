"""Plan changes outside the ladder: by the trainer, by pins and limits, on another machine, for a larger policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.job import grown_spec
from rljob_api.memory_plan import MemoryPlan, MemorySettings
from rljob_api.plan_change import PlanChange, RemedyStatus
from rljob_api.recovery import larger_policies
from rljob_api.topology import worker_pods
from rljob_memory.budget import Setup
from rljob_memory.hardware import Hardware
from rljob_memory.model_shape import ModelShape
from rljob_memory.plan import first_plan
from rljob_memory.plan_settings import with_pins
from rljob_memory.recovery import RecoveryState
from rljob_memory.recovery.constraints import within_max_gpus
from rljob_memory.recovery.other_machine import differing_facts, plan_facts, rederived
from rljob_memory.sizes import GIB
from rljob_memory.workload import Workload
from rljob_testing.memory_plans import memory_plan
from tests.unit.memory.recovery.failures import (
    FIRST_PLAN,
    change_after,
    constraints,
    diagnosis,
    failure,
    growing_job,
)

SETTINGS = ("microBatchTokens", "detachMetrics", "hostMemoryBytes")


def change(
    setting: str = SETTINGS[0], generation: int = 2, *, step: int = 5, seconds: float | None = None
) -> PlanChange:
    made = change_after(failure(diagnosis("ActivationSpike"), step=step), FIRST_PLAN, constraints()).change
    remedy = RemedyStatus(setting=setting, before="2", after="1", observed_bytes=None if seconds is None else 7)
    return made.model_copy(update={"generation": generation, "remedy": remedy, "seconds_to_recover": seconds})


# --- the supervisor's state, merged with the changes of a trainer ---


def state(*changes: PlanChange, generation: int = 1) -> RecoveryState:
    plan = FIRST_PLAN.model_copy(update={"generation": generation})
    return RecoveryState.replayed(plan, changes, committed_step=9, steps=100)


def test_the_trainers_newer_plan_is_adopted_with_its_changes() -> None:
    newer = FIRST_PLAN.model_copy(update={"generation": 3, "micro_batch_tokens": 1})
    merged = state().merge(newer, [change(), change(generation=3)])
    assert merged.plan == newer
    assert [each.generation for each in merged.changes] == [2, 3]
    assert (merged.adjustments, merged.committed_step) == (2, 9)


def test_the_settings_of_the_pods_stay_the_supervisors() -> None:
    given_by_operator = replace(state(), plan=FIRST_PLAN.model_copy(update={"excluded_nodes": ["gpu-1"]}))
    claimed = FIRST_PLAN.model_copy(update={"generation": 2, "host_memory_bytes": 1 << 40, "policy_gpus": 2})
    merged = given_by_operator.merge(claimed, [change()]).plan
    assert merged is not None
    assert (merged.excluded_nodes, merged.host_memory_bytes, merged.policy_gpus) == (["gpu-1"], None, None)
    decided = given_by_operator.merge(claimed, [change("policyGpus")], decides_pods=False).plan
    assert decided is not None
    assert decided.policy_gpus == 2


def test_of_two_changes_of_one_generation_the_supervisors_wins() -> None:
    supervisors = state(change("hostMemoryBytes"), generation=2)
    trainers = FIRST_PLAN.model_copy(update={"generation": 2, "micro_batch_tokens": 1})
    assert supervisors.merge(trainers, [change("microBatchTokens", seconds=1.0)]) == supervisors


def test_only_the_effect_of_a_known_change_is_learned() -> None:
    supervisors = state(change(), generation=2)
    [learned] = supervisors.merge(supervisors.plan, [change(step=99, seconds=3.5)]).changes
    assert (learned.seconds_to_recover, learned.remedy.observed_bytes, learned.step) == (3.5, 7, 5)


changes = st.builds(
    change,
    st.sampled_from(SETTINGS),
    st.integers(min_value=2, max_value=6),
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


# --- a setting that the user pins after a failure holds from the next attempt on ---

PLAN = memory_plan(generation=3)


@pytest.mark.parametrize(
    ("memory", "changed"),
    [
        ({"detachMetrics": "Disabled"}, {"detach_metrics": False}),
        ({"weightExport": "ReservedBuffer"}, {"weight_export": "ReservedBuffer"}),
        ({"syncBucketSize": "64Mi"}, {"sync_bucket_bytes": 64 << 20}),
        ({"rolloutSleep": "Level1"}, {"rollout_sleep": "Level1"}),
        ({}, {}),
        ({"detachMetrics": "Enabled"}, {}),
    ],
)
def test_a_newly_pinned_value_raises_the_generation(memory: dict[str, Any], changed: dict[str, Any]) -> None:
    pinned = with_pins(PLAN, growing_job(memory=memory), shares_gpu=True)
    assert pinned == PLAN.model_copy(update={"generation": 4 if changed else 3, **changed})


def test_a_pinned_sleep_level_holds_only_beside_the_policy() -> None:
    level_1 = growing_job(memory={"rolloutSleep": "Level1"})
    awake = with_pins(PLAN, level_1, shares_gpu=False)
    assert awake == PLAN.model_copy(update={"generation": 4, "rollout_sleep": "Disabled"})
    assert with_pins(awake, level_1, shares_gpu=False) == awake
    assert with_pins(PLAN, level_1, shares_gpu=None) == PLAN, "until the devices are known"


def test_a_plan_has_the_size_of_the_engines_that_the_manifest_has() -> None:
    """Plans of earlier versions have no size."""
    pairs = growing_job(policy={"gpusPerReplica": 2}, rollout={"tensorParallelSize": 2})
    assert with_pins(PLAN, pairs, shares_gpu=True).tensor_parallel_size == 2
    chosen = PLAN.model_copy(update={"tensor_parallel_size": 2})
    assert with_pins(chosen, growing_job(policy={"gpusPerReplica": 2}), shares_gpu=True) == chosen


# --- a plan from another machine is computed again, within the limits that failures have set ---

MODEL = ModelShape(596_000_000, 28, 1024, 8, 128, 151_936, 2)
WORK = Workload(64, 16, 1024, 8192, 256, 1, 1)
LARGE = Hardware("cuda", 140 * GIB, 512 * GIB)
SMALL = Hardware("cuda", 24 * GIB, 128 * GIB)
ON_LARGE, ON_SMALL = (first_plan(MemorySettings(), Setup(WORK, MODEL, hardware)) for hardware in (LARGE, SMALL))


def test_sizes_of_a_larger_gpu_are_not_carried_to_a_smaller_one() -> None:
    changed = ON_LARGE.model_copy(
        update={"generation": 2, "micro_batch_tokens": 9300, "activation_checkpointing": True}
    )
    plan = rederived(changed, [change("microBatchTokens"), change("activationCheckpointing")], ON_SMALL)
    assert plan.generation == 3
    assert plan.kv_cache_bytes == ON_SMALL.kv_cache_bytes < changed.kv_cache_bytes / 4
    assert plan.micro_batch_tokens == min(9300, ON_SMALL.micro_batch_tokens)
    assert plan.activation_checkpointing


@pytest.mark.parametrize("kept", [{"excluded_nodes": ["node-7"]}, {"policy_gpus": 2}])
def test_what_failed_stays_a_limit_on_a_larger_gpu(kept: dict[str, Any]) -> None:
    changed = ON_SMALL.model_copy(update={"generation": 4, "kv_cache_bytes": 2 * GIB, **kept})
    plan = rederived(changed, [change("kvCache")], ON_LARGE)
    assert plan == ON_LARGE.model_copy(update={"generation": 5, "kv_cache_bytes": 2 * GIB, **kept})


@pytest.mark.parametrize(
    ("setting", "kept"),
    [("policyGpus", {"policy_gpus": 16, "policy_copies": 1}), ("rolloutSleep", {"empty_cache": True})],
)
def test_what_a_change_brought_stays_with_it(setting: str, kept: dict[str, Any]) -> None:
    sleeping = {"rollout_sleep": "Level2"} if setting == "rolloutSleep" else {}
    fresh = ON_LARGE.model_copy(update={"policy_copies": 2, "empty_cache": False})
    changed = fresh.model_copy(update={"generation": 2, **sleeping, **kept})
    assert rederived(changed, [change(setting)], fresh) == changed


def test_a_size_that_was_raised_stays_a_lower_limit() -> None:
    changed = ON_LARGE.model_copy(update={"generation": 2})
    raised = RemedyStatus(setting="kvCache", before="1Gi", after="2Gi")
    plan = rederived(changed, [change().model_copy(update={"remedy": raised})], ON_SMALL)
    assert plan.kv_cache_bytes == ON_LARGE.kv_cache_bytes > ON_SMALL.kv_cache_bytes


def test_the_same_values_are_the_same_plan() -> None:
    plan = ON_LARGE.model_copy(update={"generation": 3})
    assert rederived(plan, [], plan.model_copy(update={"generation": 1})) is plan


@pytest.mark.parametrize(
    ("hardware", "work", "expected"),
    [
        ({}, {}, []),
        ({"shared_memory_bytes": GIB}, {"kept_checkpoints": 5}, []),
        ({"device_memory_bytes": 139 * GIB, "host_memory_bytes": 500 * GIB}, {}, []),
        ({"host_memory_bytes": 768 * GIB}, {}, []),
        ({"host_memory_bytes": 128 * GIB}, {}, ["host_memory_bytes 512Gi, now 128Gi"]),
        ({"device_memory_bytes": 24 * GIB}, {}, ["device_memory_bytes 140Gi, now 24Gi"]),
        ({}, {"policy_ranks": 8, "engines": 8}, ["policy_ranks 1, now 8", "engines 1, now 8"]),
        ({}, {"max_prompt_tokens": 2048}, ["max_prompt_tokens 1024, now 2048"]),
    ],
)
def test_differences_of_the_machine_and_of_the_work_are_named(
    hardware: dict[str, Any], work: dict[str, Any], expected: list[str]
) -> None:
    found = plan_facts(Setup(replace(WORK, **work), MODEL, replace(LARGE, **hardware)))
    assert differing_facts(plan_facts(Setup(WORK, MODEL, LARGE)), found) == expected
    assert differing_facts({}, found) == []


# --- a larger policy ---


@pytest.mark.parametrize(
    ("most", "prompts", "policy", "sizes"),
    [
        (8, 16, {}, (2, 4, 8)),
        (7, 16, {}, (2, 4)),
        (64, 16, {"replicas": 2, "gpusPerReplica": 4}, (16,)),
        (8, 16, {"replicas": 3}, (4, 8)),
        (8, 12, {}, (2, 4)),
        (8, 16, {"replicas": 2, "gpusPerReplica": 0}, (4, 8)),
    ],
)
def test_the_sizes_are_powers_of_two_that_fill_pods_and_divide_the_prompts(
    most: int, prompts: int, policy: dict[str, int], sizes: tuple[int, ...]
) -> None:
    assert larger_policies(growing_job(most, prompts=prompts, policy=policy)) == sizes


def test_a_grown_job_has_more_pods_like_its_first() -> None:
    before = growing_job(16, policy={"replicas": 2, "gpusPerReplica": 4})
    after = grown_spec(before, FIRST_PLAN.model_copy(update={"policy_gpus": 16}))
    assert [(pods.replicas, pods.gpus, pods.processes) for pods in worker_pods(after)] == [(4, 4, 16)]
    assert grown_spec(before, FIRST_PLAN) is before
    apart = growing_job(topology="Disaggregated", rollout={"replicas": 3})
    policy, rollout = worker_pods(grown_spec(apart, FIRST_PLAN.model_copy(update={"policy_gpus": 4})))
    assert (policy.replicas, rollout.replicas) == (4, 3), "the engines stay as they are"


@pytest.mark.parametrize(("most", "kept"), [(4, 4), (2, None), (None, None)])
def test_a_lower_limit_takes_the_growth_back(most: int | None, kept: int | None) -> None:
    plan: MemoryPlan = within_max_gpus(FIRST_PLAN.model_copy(update={"policy_gpus": 4}), growing_job(most))
    assert (plan.policy_gpus, plan.generation) == (kept, 1 if kept else 2)
