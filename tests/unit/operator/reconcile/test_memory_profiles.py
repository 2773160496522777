"""A job starts from settings that held for jobs of its shape, and records its own."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.memory_profile import MemoryProfile
from rljob_operator.observe.job_facts import stored_profile
from rljob_operator.reconcile.profile import EXPIRES_AFTER, MAX_PROFILES
from rljob_testing.simulated_cluster import CPU_NODE, GPU_NODE, PLAN, SETTINGS, START, SimulatedCluster, new_job
from tests.unit.operator.reconcile.memory_failures import FACTS, GIB, trainers_change

Profiles = dict[str, dict[str, Any]]

PEAK = {"role": "policy", "rank": 1, "peakReservedBytes": 36 * GIB, "deviceTotalBytes": 80 * GIB}
HELD = PLAN.model_copy(update={"generation": 2, "micro_batch_tokens": 2048})


def begun(
    profiles: Profiles | None = None, uid: str = "next-uid", at: datetime = START + timedelta(hours=1), **given: Any
) -> SimulatedCluster:
    """A job whose first attempt runs, in a namespace with these profiles."""
    cluster = new_job(**given)
    cluster.uid, cluster.profiles, cluster.now = uid, dict(profiles or {}), at
    return cluster.run()


def failed_once(cluster: SimulatedCluster, *, recovers: bool = True, **change: Any) -> SimulatedCluster:
    """Its trainer has changed the plan after a failure in step 4, and, if it `recovers`, committed the step."""
    made = trainers_change(cluster.tick(60), **change)
    plan: dict[str, Any] = {"plan": HELD, "plan_changes": [made], "memory_facts": FACTS, "memory": [PEAK]}
    cluster.reports(3, **plan).settle()
    return cluster.tick(60).reports(4, **plan).settled(phase="Running") if recovers else cluster


def learned(**given: Any) -> Profiles:
    """The profiles after a first job that failed, recovered and completed."""
    return failed_once(begun(uid="first-uid", **given)).complete().profiles


def parsed(profiles: Profiles) -> MemoryProfile:
    [profile] = profiles.values()
    return MemoryProfile.model_validate(profile, by_alias=True, by_name=False)


def settings_of_attempt(cluster: SimulatedCluster) -> AttemptSettings:
    """Return the settings in the first ConfigMap of a job that was not yet created."""
    for _ in range(4):
        for manifest in cluster.round().apply:
            if manifest["kind"] == "ConfigMap":
                return AttemptSettings.model_validate_json(manifest["data"]["attempt.json"])
    raise AssertionError("no ConfigMap was written")


# --- the record ---


def test_a_plan_that_held_is_recorded_once_it_is_confirmed() -> None:
    cluster = failed_once(begun(), recovers=False)
    assert cluster.profiles == {}
    failed_once(cluster)
    profile = parsed(cluster.profiles)
    [change] = profile.status.changes
    assert (change.class_name, change.phase, change.remedy.setting) == ("ActivationSpike", "update", "microBatchTokens")
    assert (profile.status.plan, profile.status.facts) == (HELD, FACTS)
    assert (profile.status.display.peak, profile.status.display.changes) == ("36.0Gi", "microBatchTokens")
    assert (profile.status.jobs, cluster.profile_writes) == (0, 1)
    cluster.complete()
    assert (parsed(cluster.profiles).status.jobs, cluster.profile_writes) == (1, 2)


def test_the_first_job_of_a_shape_records_its_peak_and_the_next_ones_write_nothing() -> None:
    first = begun().reports(3, memory_facts=FACTS, memory=[PEAK]).settled().complete()
    assert first.profile_writes == 1
    assert parsed(first.profiles).status.changes == []
    for peak, writes in ((36 * GIB, 0), (37 * GIB, 0), (40 * GIB, 1)):
        later = begun(first.profiles).reports(3, memory=[PEAK | {"peakReservedBytes": peak}]).settled().complete()
        assert (later.profile_writes, later.stored.memory_profile) == (writes, None)
    tomorrow = begun(first.profiles, uid="third-uid").tick(86_400).reports(3, memory=[PEAK]).settled().complete()
    assert parsed(tomorrow.profiles).status.jobs == 2


def test_a_job_that_stays_within_its_profile_adds_one_write() -> None:
    profiles = learned()
    cluster = begun(profiles)
    cluster.reports(3, plan=cluster.plan, memory_facts=FACTS).settled().complete()
    assert cluster.profile_writes == 1
    assert parsed(cluster.profiles).status.jobs == 2
    assert parsed(cluster.profiles).status.changes == parsed(profiles).status.changes


def test_later_failures_add_to_what_was_learned() -> None:
    chunk = {"setting": "logprobChunkTokens", "before": "1024", "after": "256"}
    cluster = begun(learned())
    changed = cluster.plan.model_copy(update={"generation": 2, "logprob_chunk_tokens": 256})
    change = trainers_change(cluster, remedy=chunk)
    cluster.reports(4, plan=changed, plan_changes=[change], memory_facts=FACTS).settle()
    status = parsed(cluster.profiles).status
    assert [each.remedy.setting for each in status.changes] == ["microBatchTokens", "logprobChunkTokens"]
    assert (status.plan.micro_batch_tokens, status.plan.logprob_chunk_tokens) == (2048, 256)


def test_a_setting_that_is_changed_again_keeps_its_first_value() -> None:
    cluster = begun(learned())
    changed = cluster.plan.model_copy(update={"generation": 2, "micro_batch_tokens": 1024})
    remedy = {"setting": "microBatchTokens", "before": "2048", "after": "1024"}
    cluster.reports(4, plan=changed, plan_changes=[trainers_change(cluster, remedy=remedy)], memory_facts=FACTS)
    status = parsed(cluster.settled().profiles).status
    assert [(each.remedy.before, each.remedy.after) for each in status.changes] == [("4096", "1024")]
    assert status.plan.micro_batch_tokens == 1024


def test_jobs_at_the_same_time_keep_what_each_has_learned() -> None:
    other = begun()  # before there was a profile
    other.profiles = learned()
    changed = PLAN.model_copy(update={"generation": 2, "logprob_chunk_tokens": 256})
    chunk = {"setting": "logprobChunkTokens", "before": "1024", "after": "256"}
    other.reports(4, plan=changed, plan_changes=[trainers_change(other, remedy=chunk)], memory_facts=FACTS).settle()
    plan = parsed(other.profiles).status.plan
    assert (plan.micro_batch_tokens, plan.logprob_chunk_tokens) == (2048, 256)


@pytest.mark.parametrize(
    "change",
    [
        {"diagnosis": {"class": "ForeignProcess", "confidence": 0.9, "message": "another job"}},
        {"remedy": {"setting": "processes", "before": "kept", "after": "fresh"}},
        {"remedy": {"setting": "excludedNodes", "before": "none", "after": "gpu-node"}},
    ],
)
def test_what_is_no_property_of_the_shape_is_not_learned(change: dict[str, Any]) -> None:
    cluster = failed_once(begun(), **change).complete()
    assert parsed(cluster.profiles).status.changes == []


@pytest.mark.parametrize(
    "given",
    [
        {"settings": SETTINGS.model_copy(update={"memory_profiles": "Disabled"})},
        {"faultInjection": {"enabled": True, "faults": [{"class": "ActivationSpike", "phase": "update", "step": 4}]}},
    ],
)
def test_switched_off_or_with_injected_faults_nothing_is_recorded(given: dict[str, Any]) -> None:
    assert learned(**given) == {}


def test_a_profile_whose_status_was_not_written_is_not_written_again() -> None:
    """Otherwise an operator that dies between the two would write it for ever."""
    changed = failed_once(begun(), recovers=False)
    changed.tick(60).reports(4, plan=HELD, plan_changes=changed.stored.plan_changes, memory_facts=FACTS)
    completing = failed_once(begun()).end("demo-controller", 0, message="all steps are committed", step=60)
    for cluster in (changed, completing):
        first = cluster.decide()
        assert first.profile is not None
        stored = {first.profile["metadata"]["name"]: stored_profile(first.profile)}
        again = cluster.tick(5).decide(replace(cluster.observe(), profiles=stored))
        assert again.status is not None
        assert again.profile is None


# --- the start ---


def test_the_next_job_of_the_shape_starts_with_the_plan_that_held() -> None:
    profiles = learned()
    cluster = begun(profiles)
    assert cluster.plan == HELD.model_copy(update={"generation": 1})
    assert cluster.events[0] == "StartedFromProfile"
    cluster.expect(plan_generation=1, adjustments=0, plan_changes=[])
    fresh = new_job()
    fresh.profiles, fresh.now = profiles, cluster.now
    settings = settings_of_attempt(fresh)
    assert settings.memory_plan == cluster.plan
    assert settings.memory_profile is not None
    assert [change.remedy.setting for change in settings.memory_profile.changes] == ["microBatchTokens"]
    assert settings.memory_profile.facts == FACTS


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm": {"steps": 60, "maxResponseTokens": 512}},
        {"model": {"uri": "hf://org/other"}},
        {"policy": {"replicas": 4}},
        {"memory": {"microBatchTokens": 8192}},
        {"memory": {"mode": "Disabled"}},
        {"recovery": {"maxHostMemory": "64Gi"}},
        {"settings": SETTINGS.model_copy(update={"memory_profiles": "Disabled"})},
        {"nodes": (CPU_NODE, replace(GPU_NODE, gpu="NVIDIA-H200"))},
    ],
)
def test_a_job_of_another_shape_starts_on_its_own(given: dict[str, Any]) -> None:
    stored = begun(learned(), **given).stored
    assert (stored.plan, stored.memory_profile) == (None, None)


@pytest.mark.parametrize("given", [{"steps": 500}, {"env": [{"name": "SEED", "value": "7"}]}, {"retry": 2}])
def test_settings_without_effect_on_memory_do_not_make_another_shape(given: dict[str, Any]) -> None:
    assert begun(learned(), **given).stored.memory_profile is not None


def test_the_gpu_that_a_job_may_get_selects_the_profile() -> None:
    h100, h200 = (replace(GPU_NODE, name=name, gpu=name) for name in ("h100", "h200"))
    profiles = learned(nodes=(CPU_NODE, replace(GPU_NODE, gpu="h200")))
    assert parsed(profiles).spec.gpu == "h200"
    assert begun(profiles, nodes=(CPU_NODE, h100)).stored.memory_profile is None
    assert begun(profiles, nodes=(CPU_NODE, h100, h200)).stored.memory_profile is not None
    selecting = {"replicas": 2, "template": {"spec": {"nodeSelector": {"nvidia.com/gpu.product": "h100"}}}}
    assert begun(profiles, nodes=(CPU_NODE, h100, h200), policy=selecting).stored.memory_profile is None


def test_profiles_of_other_namespaces_are_used_only_if_they_are_observed() -> None:
    profiles = learned()
    shared = {name: stored_profile(profile) for name, profile in profiles.items()}
    cluster = begun(facts={"shared_profiles": shared})
    assert cluster.plan.micro_batch_tokens == 2048
    assert begun().stored.plan is None


def test_another_trainer_starts_with_the_settings_that_it_reads() -> None:
    trainer = {"image": "trl:1", "adapter": "TRL"}
    first = begun(uid="first-uid", trainer=trainer)
    tokens = first.plan.micro_batch_tokens
    first.tick(60).end("demo-policy-0", 80, message="CUDA out of memory. Tried to allocate 2.00 GiB.").settle()
    setting = first.remedies[0]
    first.next_attempt_runs().settle()
    profile = parsed(first.profiles)
    assert (profile.spec.trainer, [each.remedy.setting for each in profile.status.changes]) == ("trl:1", [setting])
    later = begun(first.profiles, trainer=trainer)
    assert (later.plan.generation, later.plan.micro_batch_tokens) == (1, tokens)
    assert later.plan == first.plan.model_copy(update={"generation": 1})


# --- bounds ---


def test_a_profile_that_was_not_used_for_long_is_ignored_and_replaced() -> None:
    cluster = begun(learned(), at=START + timedelta(hours=2) + EXPIRES_AFTER)
    assert cluster.stored.plan is None
    status = parsed(cluster.reports(3, memory_facts=FACTS).settled().complete().profiles).status
    assert (status.changes, status.jobs) == ([], 1), "the job did without them"


def test_the_least_recently_used_profiles_go_first() -> None:
    [profile] = learned().values()
    before = {f"other-{number}": aged(profile, f"other-{number}", number) for number in range(MAX_PROFILES)}
    cluster = failed_once(begun(before))
    assert set(before) - set(cluster.profiles) == {"other-0"}
    assert len(cluster.profiles) == MAX_PROFILES
    expired = {f"other-{number}": aged(profile, f"other-{number}", number, EXPIRES_AFTER) for number in range(12)}
    cluster = failed_once(begun(expired))
    assert len(cluster.profiles) == 3, "a few at a time"


def aged(profile: dict[str, Any], name: str, number: int, age: timedelta = timedelta()) -> dict[str, Any]:
    used = (START + timedelta(seconds=number) - age).isoformat()
    status = profile["status"] | {"lastUsedTime": used}
    return profile | {"metadata": profile["metadata"] | {"name": name}, "status": status}


def test_a_profile_of_another_version_counts_as_none() -> None:
    [(name, profile)] = learned().items()
    unknown = profile | {"status": profile["status"] | {"later": 1}}
    cluster = begun({name: unknown})
    assert cluster.stored.plan is None
    assert parsed(failed_once(cluster).profiles).status.jobs == 0


def test_a_profile_with_any_content_stops_no_job() -> None:
    [(name, profile)] = learned().items()
    unknown = {"class": "C" * 64, "role": "policy", "remedy": {"setting": "s" * 64, "before": "b", "after": "a"}}
    known = unknown | {"remedy": {"setting": "microBatchTokens", "before": "b" * 64, "after": ""}}
    plan = profile["status"]["plan"] | {"excludedNodes": ["gpu-node"], "policyGpus": 1024, "generation": 2**53}
    status = profile["status"] | {"changes": [known] * 5 + [unknown] * 15, "jobs": 2**53, "plan": plan}
    cluster = begun({name: profile | {"status": status}})
    assert (cluster.plan.generation, cluster.plan.excluded_nodes, cluster.plan.policy_gpus) == (1, [], None)
    written = parsed(failed_once(cluster).complete().profiles).status
    assert ([change.remedy.setting for change in written.changes], written.jobs) == (["microBatchTokens"], 2**53)
