"""The policy gets more GPUs once no setting is left, within recovery.maxGpus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_api.grown_job import grown_spec
from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.policy_growth import larger_policies
from rljob_api.topology import worker_pods
from rljob_memory.recovery import Changed, Constraints, GiveUp, RecoveryState, Response, Restart
from rljob_memory.recovery.growth import policy_growth, within_max_gpus
from rljob_memory.recovery.other_machine import rederived
from rljob_memory.sizes import GIB
from tests.unit.memory.recovery.failures import (
    FACTS,
    FIRST_PLAN,
    IN_THE_OPERATOR,
    IN_THE_TRAINER,
    ON_A_CPU,
    ON_ONE_MACHINE,
    answer,
    answers_to,
    constraints,
    diagnosis,
    explanation_of,
    failure,
    settings_in_order,
)
from tests.unit.memory.recovery.questions import PINNABLE, settings_that_pin

LOADING = failure(diagnosis("OptimizerState", requested_bytes=8 * GIB, free_bytes=GIB), phase=None)


def spec(most: int | None = 4, *, prompts: int = 16, **more: Any) -> RLJobSpec:
    values = {
        "model": {"uri": "hf://org/name"},
        "task": {"name": "digits"},
        "algorithm": {"steps": 100, "promptsPerStep": prompts},
        "recovery": {} if most is None else {"maxGpus": most},
    }
    return RLJobSpec.model_validate(values | more)


def given(of: RLJobSpec | None = None, *, pinned: bool = True, room: int | None = None, **more: Any) -> Constraints:
    """Of the operator unless `levels` are given; `pinned`: no setting may be changed."""
    levels = more.pop("levels", IN_THE_OPERATOR)
    by_operator = "ReplacePods" in levels
    growth = policy_growth(of or spec(), "ReplacePods" if by_operator else "RestartInPlace", room=room)
    found = constraints(levels, growth=growth, **more)
    return replace(found, settings=settings_that_pin(PINNABLE)) if pinned else found


def grown_to(response: Response) -> int:
    assert isinstance(response, Changed), response
    assert response.change.remedy.setting == "policyGpus"
    assert response.plan.policy_gpus is not None
    return response.plan.policy_gpus


# --- sizes ---


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
    assert larger_policies(spec(most, prompts=prompts, policy=policy)) == sizes


def test_a_grown_job_has_more_pods_like_its_first() -> None:
    before = spec(16, policy={"replicas": 2, "gpusPerReplica": 4})
    after = grown_spec(before, FIRST_PLAN.model_copy(update={"policy_gpus": 16}))
    assert [(pods.replicas, pods.gpus, pods.processes) for pods in worker_pods(after)] == [(4, 4, 16)]
    assert grown_spec(before, FIRST_PLAN) is before
    apart = spec(4, topology="Disaggregated", rollout={"replicas": 3})
    policy, rollout = worker_pods(grown_spec(apart, FIRST_PLAN.model_copy(update={"policy_gpus": 4})))
    assert (policy.replicas, rollout.replicas) == (4, 3), "the engines stay as they are"


# --- the remedy ---


def test_the_policy_grows_when_no_setting_is_left() -> None:
    changes, end = answers_to([LOADING] * 30, FIRST_PLAN, given(pinned=False, recovery={"maxAdjustments": 100}))
    assert settings_in_order(changes)[-1] == "policyGpus"
    assert settings_in_order(changes).count("policyGpus") == 1
    assert len(changes) > 2, "settings come first"
    assert isinstance(end, Restart), "another policy of two ranks would be the same"


def test_growth_is_recorded_like_every_change() -> None:
    response = answer(LOADING, FIRST_PLAN, given())
    assert grown_to(response) == 2
    assert isinstance(response, Changed)
    change, profile = response.change, FACTS
    assert (change.remedy.before, change.remedy.after, change.level) == ("1", "2", "ReplacePods")
    assert change.remedy.expected_bytes == (profile.trained_bytes + profile.optimizer_bytes) // 2
    assert "policyGpus 1 → 2 (generation 2, expected to free" in response.message
    assert response.renew == {"policy", "rollout"}


@pytest.mark.parametrize("recovery", [{"maxAdjustments": 0}, {}])
def test_growth_counts_against_max_gpus_alone(recovery: dict[str, int]) -> None:
    response = answer(LOADING, FIRST_PLAN, given(pinned=not recovery, recovery=recovery))
    assert grown_to(response) == 2
    assert isinstance(response, Changed)
    assert response.state.adjustments == 0
    assert "adjustment" not in response.message


def test_an_offloaded_optimizer_state_is_not_expected_to_be_freed() -> None:
    response = answer(LOADING, FIRST_PLAN.model_copy(update={"optimizer_offload": True}), given())
    assert isinstance(response, Changed)
    assert response.change.remedy.expected_bytes == FACTS.trained_bytes // 2


@pytest.mark.parametrize(
    "evidence",
    [
        failure(diagnosis("KVCacheOversized"), role="rollout", phase="rollout"),
        failure(diagnosis("ForeignProcess", other_processes_bytes=GIB)),
        failure(diagnosis("RetainedGraph")),
        failure(diagnosis("SharedMemory"), phase="sync"),
        failure(diagnosis("HostMemory")),
    ],
)
def test_other_failures_do_not_grow_the_policy(evidence: Any) -> None:
    response = answer(evidence, FIRST_PLAN, given())
    assert not isinstance(response, Changed) or response.change.remedy.setting != "policyGpus"


def test_host_memory_on_the_cpu_is_divided_among_pods_only() -> None:
    killed = failure(diagnosis("HostMemory"))
    assert grown_to(answer(killed, FIRST_PLAN, given(profile=ON_A_CPU))) == 2
    assert isinstance(answer(killed, FIRST_PLAN, given(levels=ON_ONE_MACHINE, profile=ON_A_CPU)), GiveUp)


def test_a_trainer_in_pods_leaves_growth_to_the_operator() -> None:
    response = answer(LOADING, FIRST_PLAN, replace(given(levels=IN_THE_TRAINER), growth=None))
    assert isinstance(response, GiveUp)
    assert response.reason == "LeftToSupervisor"


def test_without_max_gpus_the_policy_never_grows() -> None:
    assert policy_growth(spec(None), "ReplacePods") is None
    assert isinstance(answer(LOADING, FIRST_PLAN, given(spec(None), levels=ON_ONE_MACHINE)), GiveUp)


def test_a_plan_that_must_not_change_keeps_the_size() -> None:
    response = answer(LOADING, FIRST_PLAN, given(levels=ON_ONE_MACHINE, memory={"mode": "Disabled"}, pinned=False))
    assert isinstance(response, GiveUp)


# --- the limits, for people ---


def test_one_machine_grows_the_policy_only_if_it_has_the_gpus() -> None:
    response = answer(LOADING, FIRST_PLAN, given(levels=ON_ONE_MACHINE, room=2))
    assert grown_to(response) == 2
    assert isinstance(response, Changed)
    assert response.change.level == "RestartInPlace"
    end = answer(LOADING, FIRST_PLAN, given(levels=ON_ONE_MACHINE, room=1))
    assert isinstance(end, GiveUp)
    assert "the policy could grow from 1 to 2 GPUs, but this machine has only 1 for it" in explanation_of(end)


@pytest.mark.parametrize("recovery", [{}, {"maxAdjustments": 0}])
def test_a_policy_of_the_largest_size_says_what_to_write(recovery: dict[str, int]) -> None:
    plan = FIRST_PLAN.model_copy(update={"policy_gpus": 4})
    end = answer(LOADING, plan, given(grown_spec(spec(), plan), recovery=recovery))
    assert "recovery.maxGpus is 4, and the policy has 4 GPUs: raise it" in explanation_of(end)


# --- the plan afterwards ---


def test_a_plan_for_more_ranks_keeps_the_growth() -> None:
    plan = FIRST_PLAN.model_copy(update={"policy_gpus": 2, "micro_batch_tokens": 1_000, "generation": 7})
    assert rederived(plan, [], FIRST_PLAN) == FIRST_PLAN.model_copy(update={"policy_gpus": 2, "generation": 8})


@pytest.mark.parametrize(("most", "kept"), [(4, 4), (2, None), (None, None)])
def test_a_lower_limit_takes_the_growth_back(most: int | None, kept: int | None) -> None:
    plan = within_max_gpus(FIRST_PLAN.model_copy(update={"policy_gpus": 4}), spec(most))
    assert (plan.policy_gpus, plan.generation) == (kept, 1 if kept else 2)


@pytest.mark.parametrize(("decides_pods", "size"), [(True, None), (False, 2)])
def test_a_trainer_in_pods_cannot_grow_the_policy(decides_pods: bool, size: int | None) -> None:
    response = answer(LOADING, FIRST_PLAN, given(levels=ON_ONE_MACHINE))
    assert isinstance(response, Changed)
    state = RecoveryState(FIRST_PLAN, 100).merge(response.plan, [response.change], decides_pods=decides_pods)
    merged: MemoryPlan | None = state.plan
    assert merged is not None
    assert merged.policy_gpus == size
