"""The change that answers each class of failure, its level and its expected effect."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat

import pytest

from rljob_api.memory_profile import MemoryProfile
from rljob_api.plan_change import Phase, Role
from rljob_api.roles import ADAPTER_SETTINGS
from rljob_api.step_report import RankMemory
from rljob_memory.estimate import OPTIMIZER_STEP_BYTES
from rljob_memory.recovery import GiveUp, Restart, messages
from rljob_memory.sizes import GIB, MIB
from tests.unit.memory.recovery.failures import (
    ALL_OFF,
    FACTS,
    FIRST_PLAN,
    FRAGMENTED,
    IN_THE_OPERATOR,
    IN_THE_TRAINER,
    ON_A_CPU,
    ON_ONE_MACHINE,
    answer,
    answers_to,
    change_after,
    constraints,
    diagnosis,
    explanation_of,
    failure,
    settings_in_order,
)


def test_fragmentation_enables_expandable_segments_live() -> None:
    remedy = change_after(failure(FRAGMENTED), ALL_OFF, constraints(IN_THE_TRAINER))
    assert remedy.plan == ALL_OFF.model_copy(update={"expandable_segments": True, "generation": 2})
    assert remedy.change.level == "Live"
    assert not remedy.renew
    changed = remedy.change.remedy
    assert (changed.setting, changed.before, changed.after) == ("expandableSegments", "Disabled", "Enabled")
    assert changed.expected_bytes == 6 * GIB
    expected = "expandableSegments Disabled → Enabled (generation 2, expected to free 6.00 GiB)"
    assert messages.changed_message(remedy.change) == expected
    assert remedy.message == f"Fragmentation: It was Fragmentation; {expected} (adjustment 1 of 6)"


@pytest.mark.parametrize(
    ("failure_class", "role", "phase", "expected"),
    [
        ("Fragmentation", "policy", "update", "expandableSegments"),
        ("AllocatorCache", "rollout", "sync", "emptyCache"),
        ("RetainedGraph", "policy", "update", "detachMetrics"),
        ("ActivationSpike", "policy", "update", "microBatchTokens"),
        ("ActivationSpike", "policy", None, "microBatchTokens"),
        ("KVCacheOversized", "rollout", None, "policyOffload"),
        ("WeightSyncSpike", "policy", "sync", "syncBucketSize"),
        ("OptimizerState", "policy", "update", "optimizerOffload"),
        ("EngineNotAsleep", "policy", "update", "rolloutSleep"),
        ("ForeignProcess", "policy", "update", "processes"),
        ("ControllerContext", "policy", "update", "processes"),
        ("HostMemory", "rollout", "rollout", "hostMemory"),
        ("HostMemory", "controller", "reward", "controllerHostMemory"),
        ("SharedMemory", "policy", "sync", "sharedMemory"),
        ("Unknown", "policy", "update", "microBatchTokens"),
    ],
)
def test_each_class_has_its_remedy(failure_class: str, role: Role, phase: Phase | None, expected: str) -> None:
    given = constraints(host_memory_limit_bytes=32 * GIB, recovery={"maxHostMemory": "64Gi"}, node="gpu-1")
    plan = FIRST_PLAN.model_copy(
        update={
            "detach_metrics": failure_class != "RetainedGraph",
            "empty_cache": failure_class != "AllocatorCache",
            "expandable_segments": failure_class != "Fragmentation",
            "rollout_sleep": "Disabled" if failure_class == "EngineNotAsleep" else "Level2",
            "sync_bucket_bytes": GIB,
        }
    )
    evidence = failure(diagnosis(failure_class), role=role, phase=phase)
    assert change_after(evidence, plan, given).change.remedy.setting == expected


def test_a_smaller_micro_batch_halves_down_to_the_longest_sequence() -> None:
    spike = failure(diagnosis("ActivationSpike", requested_bytes=GIB // 2, free_bytes=0))
    plan = FIRST_PLAN.model_copy(update={"micro_batch_tokens": 2_000, "logprob_chunk_tokens": 384})
    remedies, _ = answers_to([spike] * 3, plan, constraints(IN_THE_TRAINER))
    assert [(remedy.change.remedy.setting, remedy.change.remedy.after) for remedy in remedies][:2] == [
        ("microBatchTokens", "1000"),
        ("microBatchTokens", str(FACTS.longest_sequence_tokens)),
    ]
    assert remedies[0].change.remedy.expected_bytes == 1_000 * FACTS.activation_bytes_per_token
    assert remedies[2].change.remedy.setting == "activationCheckpointing"
    assert remedies[2].change.level == "RespawnRole"


def test_logits_that_do_not_fit_are_computed_in_smaller_chunks() -> None:
    logits = FIRST_PLAN.logprob_chunk_tokens * 4 * 151_936
    by_size = failure(diagnosis("ActivationSpike", requested_bytes=logits, free_bytes=logits // 2))
    remedy = change_after(by_size, FIRST_PLAN, constraints())
    assert remedy.change.remedy.setting == "logprobChunkTokens"
    assert remedy.plan.logprob_chunk_tokens == FIRST_PLAN.logprob_chunk_tokens // 4
    in_an_mlp = failure(diagnosis("ActivationSpike", requested_bytes=logits // 8, free_bytes=0))
    assert change_after(in_an_mlp, FIRST_PLAN, constraints()).change.remedy.setting == "microBatchTokens"


def test_an_unused_token_budget_shrinks_from_the_tokens_of_a_step() -> None:
    huge = FIRST_PLAN.model_copy(update={"micro_batch_tokens": 1 << 20, "logprob_chunk_tokens": 1 << 20})
    few = replace(constraints(), profile=FACTS.model_copy(update={"rank_tokens": 4_096}))
    in_an_mlp = failure(diagnosis("ActivationSpike", requested_bytes=10 * GIB, free_bytes=0))
    remedy = change_after(in_an_mlp, huge, few)
    assert (remedy.change.remedy.setting, remedy.plan.micro_batch_tokens) == ("microBatchTokens", 2_048)
    logits = failure(diagnosis("ActivationSpike", requested_bytes=4_096 * 4 * 151_936, free_bytes=0))
    remedy = change_after(logits, huge, few)
    assert remedy.plan.logprob_chunk_tokens == 1_024
    assert remedy.change.remedy.expected_bytes == 3_072 * FACTS.logits_bytes_per_token
    pinned: dict[str, object] = {"microBatchTokens": 1 << 20, "logprobChunkTokens": 1 << 20}
    remedy = change_after(in_an_mlp, huge, constraints(profile=few.profile, memory=pinned))
    assert remedy.change.remedy.setting == "optimizerOffload", "it frees more"
    pinned["optimizerOffload"] = "Disabled"
    remedy = change_after(in_an_mlp, huge, constraints(profile=few.profile, memory=pinned))
    assert remedy.change.remedy.setting == "activationCheckpointing"
    a_token = FACTS.activation_bytes_per_token - FACTS.checkpointed_activation_bytes_per_token
    assert remedy.change.remedy.expected_bytes == 4_096 * a_token


def test_the_kv_cache_shrinks_by_the_missing_memory() -> None:
    def after(missing: int) -> int:
        kv = diagnosis("KVCacheOversized", wanted_bytes=missing + GIB, free_bytes=GIB)
        plan = FIRST_PLAN.model_copy(update={"kv_cache_bytes": 40 * GIB})
        return change_after(failure(kv, role="rollout", phase=None), plan, constraints()).plan.kv_cache_bytes

    assert after(2 * GIB) == 30 * GIB
    assert after(25 * GIB) == 15 * GIB
    assert 0 <= after(40 * GIB) - FACTS.smallest_kv_cache_bytes < MIB, "one sequence, in whole MiB"


def test_another_trainer_gets_the_settings_of_its_adapter() -> None:
    """It reports no phase of its own, and the size of its state is unknown."""
    other = constraints(profile=None, supported_settings=ADAPTER_SETTINGS["Verl"], recovery={"maxAdjustments": 50})
    plan = FIRST_PLAN.model_copy(update={"sync_bucket_bytes": GIB, "rollout_sleep": "Disabled"})
    for phase in (None, "update"):
        spike = failure(diagnosis("WeightSyncSpike"), phase=phase)
        remedies, _ = answers_to(repeat(spike, 30), plan, other, committed_each_time=1)
        assert [remedy.plan.sync_bucket_bytes // MIB for remedy in remedies][:4] == [512, 256, 128, 128]
        assert "optimizerOffload" in settings_in_order(remedies)
    state = failure(diagnosis("OptimizerState"), phase="update")
    remedies, _ = answers_to(repeat(state, 30), plan, other, committed_each_time=1)
    assert not {"optimizerOffload", "syncBucketSize"} & set(settings_in_order(remedies)), "an update has the state"


@pytest.mark.parametrize(
    ("numbers", "least", "most"),
    [
        ({"wanted_bytes": 72 * GIB, "free_bytes": 45 * GIB}, 0.57, 45 / 72),
        ({"wanted_bytes": 72 * GIB, "free_bytes": 71 * GIB}, 0.75, 0.75),
        ({"requested_bytes": 30 * GIB, "free_bytes": 18 * GIB}, 0.75, 0.75),
        ({}, 0.75, 0.75),
    ],
)
def test_another_trainers_engine_keeps_the_part_that_fits(numbers: dict[str, int], least: float, most: float) -> None:
    """The plan's size only counts relative to its first one, so the missing bytes are no part of it."""
    other = constraints(profile=None, supported_settings=frozenset({"kvCache"}))
    plan = FIRST_PLAN.model_copy(update={"kv_cache_bytes": 16 * GIB, "rollout_sleep": "Disabled"})
    refused = failure(diagnosis("KVCacheOversized", **numbers), phase=None)
    after = change_after(refused, plan, other).plan.kv_cache_bytes
    assert least <= after / (16 * GIB) <= most


def test_a_kv_cache_that_is_too_small_grows_once() -> None:
    needed = [
        diagnosis("KVCacheOversized", needed_bytes=number * GIB, available_bytes=2 * GIB) for number in (8, 16, 32)
    ]
    plan = FIRST_PLAN.model_copy(update={"kv_cache_bytes": 2 * GIB})
    remedies, _ = answers_to([failure(each, role="rollout", phase=None) for each in needed], plan, constraints())
    assert remedies[0].plan.kv_cache_bytes == 8 * GIB
    assert "expected to free" not in remedies[0].message
    assert "kvCache" not in settings_in_order(remedies[1:])


def test_weights_are_sent_in_halves_down_to_the_largest_parameter() -> None:
    spike = failure(diagnosis("WeightSyncSpike", 0.9), phase="sync")
    plan = FIRST_PLAN.model_copy(update={"sync_bucket_bytes": 3 * FACTS.largest_parameter_bytes})
    remedies, _ = answers_to([spike] * 3, plan, constraints(IN_THE_TRAINER))
    buckets = [remedy.plan.sync_bucket_bytes for remedy in remedies]
    assert buckets[:2] == [3 * FACTS.largest_parameter_bytes // 2, FACTS.largest_parameter_bytes]
    assert remedies[2].change.remedy.setting == "optimizerOffload", "a sleeping engine has no KV cache in a sync"
    assert [remedy.change.level for remedy in remedies] == ["Live", "Live", "RespawnRole"]


def test_a_bucket_is_not_made_smaller_by_a_rounding() -> None:
    """297 MiB instead of 296.75 MiB was the remedy of a failed sync on an H200."""
    spike = failure(diagnosis("WeightSyncSpike", 0.9), phase="sync")
    plan = FIRST_PLAN.model_copy(update={"sync_bucket_bytes": 297 * MIB})
    assert 0 < plan.sync_bucket_bytes - FACTS.largest_parameter_bytes < MIB
    assert change_after(spike, plan, constraints(IN_THE_TRAINER)).change.remedy.setting != "syncBucketSize"


@pytest.mark.parametrize("failure_class", ["WeightSyncSpike", "AllocatorCache", "Unknown"])
def test_a_kv_cache_that_is_away_while_weights_are_sent_stays(failure_class: str) -> None:
    spike = failure(diagnosis(failure_class), phase="sync")
    remedies, _ = answers_to(repeat(spike, 9), FIRST_PLAN, constraints())
    assert "kvCache" not in settings_in_order(remedies)
    awake, _ = answers_to(repeat(spike, 9), ALL_OFF, constraints(memory={"rolloutSleep": "Disabled"}))
    assert "kvCache" in settings_in_order(awake)
    of_engine, _ = answers_to(repeat(spike.model_copy(update={"role": "rollout"}), 9), FIRST_PLAN, constraints())
    assert "kvCache" in settings_in_order(of_engine), "it may have come back already"


def test_the_export_buffer_is_reserved_until_it_prevents_an_update() -> None:
    in_pieces = failure(diagnosis("Fragmentation"), phase="sync")
    remedy = change_after(in_pieces, FIRST_PLAN, constraints())
    assert (remedy.plan.weight_export, set(remedy.renew)) == ("ReservedBuffer", {"policy"})
    kept = FIRST_PLAN.model_copy(update={"weight_export": "ReservedBuffer"})
    in_the_way = failure(diagnosis("OptimizerState"))
    assert change_after(in_the_way, kept, constraints()).plan.weight_export == "SwitchSegments"


def test_the_optimizer_is_offloaded_only_if_the_host_can_hold_it() -> None:
    state = failure(diagnosis("OptimizerState"))
    remedy = change_after(state, FIRST_PLAN, constraints())
    assert remedy.change.remedy.expected_bytes == 10 * 596_000_000 - OPTIMIZER_STEP_BYTES, "buckets are on the GPU"
    little = FACTS.model_copy(update={"host_memory_bytes": 6 * GIB})
    remedies, _ = answers_to(repeat(state, 9), FIRST_PLAN, constraints(profile=little))
    assert "optimizerOffload" not in settings_in_order(remedies)


WEIGHTS = 2 * 596_000_000


def test_the_policys_weights_make_room_for_an_engine_that_generates() -> None:
    kv = diagnosis("KVCacheOversized", wanted_bytes=2 * GIB, free_bytes=GIB)
    remedy = change_after(failure(kv, role="rollout", phase=None), FIRST_PLAN, constraints(IN_THE_TRAINER))
    changed = remedy.change.remedy
    assert (changed.setting, changed.before, changed.after) == ("policyOffload", "Disabled", "Enabled")
    assert changed.expected_bytes == WEIGHTS
    assert (remedy.change.level, set(remedy.renew)) == ("RespawnRole", {"rollout"}), "the policy's processes stay"
    more = diagnosis("KVCacheOversized", wanted_bytes=9 * GIB, free_bytes=GIB)
    larger = FIRST_PLAN.model_copy(update={"kv_cache_bytes": 40 * GIB})
    remedy = change_after(failure(more, role="rollout", phase=None), larger, constraints())
    assert remedy.change.remedy.setting == "kvCache", "it covers more"


@pytest.mark.parametrize(
    ("failure_class", "role", "phase", "numbers", "plan"),
    [
        ("KVCacheOversized", "policy", "update", {}, {}),
        ("KVCacheOversized", "rollout", None, {}, {"rollout_sleep": "Disabled"}),
        ("KVCacheOversized", "rollout", None, {}, {"policy_offload": True}),
        ("KVCacheOversized", "rollout", None, {"needed_bytes": 8 * GIB}, {}),
        ("ActivationSpike", "policy", "update", {}, {}),
        ("WeightSyncSpike", "rollout", "sync", {}, {}),
        ("Unknown", "rollout", "sync", {}, {}),
        ("EngineNotAsleep", "policy", "update", {}, {}),
        ("OptimizerState", "policy", "update", {}, {}),
    ],
)
def test_the_policys_weights_stay_if_that_would_free_nothing(
    failure_class: str, role: Role, phase: Phase | None, numbers: dict[str, int], plan: dict[str, object]
) -> None:
    evidence = failure(diagnosis(failure_class, **numbers), role=role, phase=phase)
    remedies, _ = answers_to(repeat(evidence, 3), FIRST_PLAN.model_copy(update=plan), constraints())
    assert "policyOffload" not in settings_in_order(remedies)


def test_the_policys_weights_stay_if_the_host_cannot_hold_them_too() -> None:
    oversized = failure(diagnosis("KVCacheOversized"), role="rollout", phase="rollout")
    offloaded = FIRST_PLAN.model_copy(update={"optimizer_offload": True})
    for plan, host_bytes, expected in (
        (FIRST_PLAN, int(1.3 * WEIGHTS), True),
        (FIRST_PLAN, int(1.2 * WEIGHTS), False),
        (offloaded, int(7 * WEIGHTS), False),
        (offloaded, int(8 * WEIGHTS), True),
    ):
        profile = FACTS.model_copy(update={"host_memory_bytes": host_bytes})
        setting = change_after(oversized, plan, constraints(profile=profile)).change.remedy.setting
        assert (setting == "policyOffload") == expected


def test_host_memory_grows_by_half_up_to_its_bound() -> None:
    killed = failure(diagnosis("HostMemory"))
    given = constraints(host_memory_limit_bytes=4 * GIB, recovery={"maxHostMemory": "8Gi"})
    remedies, end = answers_to(repeat(killed, 9), FIRST_PLAN, given)
    assert [remedy.plan.host_memory_bytes for remedy in remedies] == [6 * GIB, 8 * GIB]
    assert {remedy.change.level for remedy in remedies} == {"ReplacePods"}
    assert end is not None
    assert "recovery.maxHostMemory is 8.00 GiB: write 12Gi" in explanation_of(end)


def test_host_memory_grows_from_the_larger_limit() -> None:
    """The plan's limit applies to all workers, and never lowers that of a pod."""
    plan = FIRST_PLAN.model_copy(update={"host_memory_bytes": 6 * GIB})
    given = constraints(host_memory_limit_bytes=32 * GIB, recovery={"maxHostMemory": "64Gi"})
    killed = failure(diagnosis("HostMemory"), role="rollout", phase="rollout")
    changed = change_after(killed, plan, given)
    assert changed.plan.host_memory_bytes == 48 * GIB
    assert changed.change.remedy.expected_bytes == 16 * GIB


@pytest.mark.parametrize("profile", [FACTS, ON_A_CPU], ids=["GPU", "CPU"])
def test_a_trainer_in_a_pod_leaves_host_memory_to_the_operator(profile: MemoryProfile) -> None:
    """It does not know the pod's limit apart from the machine's memory."""
    killed = failure(diagnosis("HostMemory"), diagnosis("ActivationSpike", 0.3))
    given = constraints(IN_THE_TRAINER, profile=profile, recovery={"maxHostMemory": "512Gi"})
    end = answer(killed, FIRST_PLAN, given)
    assert isinstance(end, GiveUp)
    assert "hostMemory would help, but this process cannot make that change" in end.explanation


def test_host_memory_is_freed_first_by_changes_without_cost() -> None:
    """Level 2 of the sleep mode drops the weights that level 1 keeps; the optimizer's state fits the GPU again."""
    plan = FIRST_PLAN.model_copy(update={"rollout_sleep": "Level1", "optimizer_offload": True})
    memory = RankMemory(role="policy", rank=0, device_free_bytes=60 * GIB, device_total_bytes=140 * GIB)
    killed = failure(diagnosis("HostMemory"), memory=memory)
    remedies, _ = answers_to(repeat(killed, 9), plan, constraints())
    assert settings_in_order(remedies) == ["rolloutSleep", "optimizerOffload"]
    assert remedies[-1].plan.optimizer_offload is False
    full = killed.model_copy(update={"memory": memory.model_copy(update={"device_free_bytes": GIB})})
    remedies, _ = answers_to(repeat(full, 9), plan, constraints())
    assert settings_in_order(remedies) == ["rolloutSleep"]


def test_on_a_cpu_every_setting_frees_host_memory() -> None:
    killed = failure(diagnosis("HostMemory"))
    machine = constraints(ON_ONE_MACHINE, profile=ON_A_CPU)
    remedies, _ = answers_to(repeat(killed, 6), FIRST_PLAN, machine)
    assert remedies[0].change.remedy.setting == "microBatchTokens"
    assert remedies[0].change.level == "RespawnRole", "the kernel has killed the process"
    on_gpus, end = answers_to(repeat(killed, 6), FIRST_PLAN, constraints(ON_ONE_MACHINE))
    assert not on_gpus
    assert isinstance(end, GiveUp)
    assert end.reason == "NothingLeft"
    assert "this machine has only 128.00 GiB of host memory" in explanation_of(end)


def test_shared_memory_doubles_up_to_half_the_pods_memory() -> None:
    full = failure(diagnosis("SharedMemory"), phase="sync")
    given = constraints(host_memory_limit_bytes=32 * GIB, shared_memory_bytes=6 * GIB)
    remedies, end = answers_to(repeat(full, 9), FIRST_PLAN, given)
    assert [remedy.plan.shared_memory_bytes for remedy in remedies] == [12 * GIB, 16 * GIB]
    assert end is not None
    assert "write recovery.maxSharedMemory: 32Gi" in explanation_of(end)


def test_shared_memory_grows_by_the_failed_request_at_once() -> None:
    full = failure(diagnosis("SharedMemory", wanted_bytes=900 * MIB), phase="sync")
    given = constraints(host_memory_limit_bytes=32 * GIB, shared_memory_bytes=64 * MIB)
    assert change_after(full, FIRST_PLAN, given).plan.shared_memory_bytes == 964 * MIB


def test_shared_memory_that_the_memory_limit_keeps_small_grows_with_it() -> None:
    full = failure(diagnosis("SharedMemory"), phase=None)
    given = constraints(
        recovery={"maxHostMemory": "48Gi", "maxSharedMemory": "64Gi"},
        host_memory_limit_bytes=24 * GIB,
        shared_memory_bytes=32 * GIB,
    )
    remedies, end = answers_to(repeat(full, 9), FIRST_PLAN, given)
    settings = [(remedy.change.remedy.setting, remedy.change.remedy.after) for remedy in remedies]
    assert settings == [("hostMemory", "36Gi"), ("sharedMemory", "64Gi"), ("hostMemory", "48Gi")]
    assert end is not None
    assert (
        "/dev/shm cannot be larger than the memory limit; recovery.maxHostMemory is 48.00 GiB: write 72Gi"
        in explanation_of(end)
    )


def test_a_foreign_process_costs_one_restart_and_then_the_node() -> None:
    stranger = failure(diagnosis("ForeignProcess", other_processes_bytes=70 * GIB))
    remedies, _ = answers_to([stranger] * 3, FIRST_PLAN, constraints(IN_THE_OPERATOR, node="gpu-1"))
    assert remedies[2].change.remedy.setting == "microBatchTokens", "the node is left already"
    assert [(remedy.change.remedy.setting, remedy.change.level) for remedy in remedies[:2]] == [
        ("processes", "RestartInPlace"),
        ("excludedNodes", "ReplacePods"),
    ]
    assert remedies[0].plan == FIRST_PLAN.model_copy(update={"generation": 2})
    assert remedies[1].plan.excluded_nodes == ["gpu-1"]
    assert remedies[1].change.remedy.expected_bytes == 70 * GIB


def test_a_foreign_process_on_the_only_node_is_explained() -> None:
    stranger = failure(diagnosis("ForeignProcess", other_processes_bytes=70 * GIB))
    _, end = answers_to(
        [stranger] * 2, FIRST_PLAN, constraints(IN_THE_OPERATOR, node=None, supported_settings=frozenset())
    )
    assert isinstance(end, Restart)
    assert "no other node is known to have room: stop the other process on its node" in explanation_of(end)


def test_host_memory_is_raised_at_once_to_what_is_predicted() -> None:
    facts = FACTS.model_copy(update={"predicted_host_memory_bytes": 60 * GIB})
    given = constraints(host_memory_limit_bytes=32 * GIB, recovery={"maxHostMemory": "64Gi"}, profile=facts)
    evidence = failure(diagnosis("HostMemory"), role="rollout", phase="rollout")
    remedy = change_after(evidence, FIRST_PLAN, given).change.remedy
    assert (remedy.setting, remedy.after, remedy.expected_bytes) == ("hostMemory", "60Gi", 28 * GIB)
