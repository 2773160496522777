"""MemoryProfiles: the plan that a new job starts with, and the record of a job whose plan held.

A profile is written when a change of the plan has been confirmed by a committed step, and when a job completes with
something new. Jobs of a known shape under an unchanged plan write nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

import pydantic

from rljob_api.api_model import MAX_INTEGER
from rljob_api.conditions import ConditionType
from rljob_api.fault_injection import FaultInjection
from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import (
    MemoryProfile,
    MemoryProfileSpec,
    MemoryProfileStatus,
    ProfileChange,
    ProfileDisplay,
    StartingProfile,
)
from rljob_api.metadata import API_VERSION
from rljob_api.step_report import RankMemory
from rljob_api.topology import worker_pods
from rljob_memory.diagnosis import FailureClass
from rljob_memory.hardware import gpu_name
from rljob_memory.plan_settings import name_of, texts_of
from rljob_memory.profile import differences_of_shape, profile_for, profile_name, starting_plan
from rljob_memory.recovery.other_machine import remedies_by_setting, within_limits
from rljob_memory.recovery.state import latest_answer
from rljob_memory.sizes import GIB
from rljob_operator import labels
from rljob_operator.events import EventReason
from rljob_operator.objects.attempt import Manifest
from rljob_operator.reconcile.observed import StoredProfile
from rljob_operator.reconcile.placement import allowed_nodes
from rljob_operator.reconcile.status import StatusDraft
from rljob_operator.reconcile.view import JobView

MAX_PROFILES = 200
"""Profiles of a namespace. The one that has not been used for the longest time is deleted first."""
EXPIRES_AFTER = timedelta(days=30)
"""Time without use after which a profile is ignored, and deleted when the next one of its namespace is written."""
_RECORDED_EVERY = timedelta(days=1)
_MORE_MEMORY = 1.05
"""A peak that is larger by less than this part is nothing new."""
_MOST_DELETIONS = 10
_SETTINGS = {name_of(field) for field in MemoryPlan.model_fields} - {"generation", "excludedNodes"}
_OF_ANOTHER_CAUSE = frozenset({FailureClass.FOREIGN_PROCESS})
"""Failures that do not depend on the shape of the job."""


# --- The first plan ---


def first_plan(view: JobView, draft: StatusDraft) -> MemoryPlan | None:
    """Return the plan of a job that starts from a profile, and record the profile; None if there is none to start
    from."""
    spec = view.job.spec
    if not _takes_part(view) or spec.memory.mode == "Disabled":
        return None
    profile = usable_profile(view)
    if profile is None or not profile.status.changes:
        return None
    held, name, namespace = profile.status, profile.metadata.name, profile.metadata.namespace or ""
    start = StartingProfile(name=name, namespace=namespace, facts=held.facts, changes=held.changes)
    draft.set(memory_profile=start)
    where = f" of namespace {namespace}" if namespace != view.observed.namespace else ""
    message = f"settings of memory profile {name}{where}: {', '.join(_texts(held))}"
    draft.event("Normal", EventReason.STARTED_FROM_PROFILE, message)
    return starting_plan(spec, held)


def usable_profile(view: JobView) -> MemoryProfile | None:
    """Return the profile of jobs like this one that has not expired; None if there is none. Those of the job's own
    namespace come first."""
    observed = view.observed
    for profiles in (observed.profiles, observed.shared_profiles):
        if profiles:
            fresh = {name: each for name, each in profiles.items() if not _has_expired(each.last_used_at, view.now)}
            if (found := _parsed(profile_for(view.job.spec, fresh, possible_gpus(view)))) is not None:
                return found
    return None


def _has_expired(last_used_at: datetime, now: datetime) -> bool:
    return now - last_used_at >= EXPIRES_AFTER


def possible_gpus(view: JobView) -> list[str]:
    """Return the types of the GPUs that the policy's pods may get; an empty one if it is unknown, or without
    GPUs. The name of most nodes comes first."""
    policy = view.job.spec.policy
    if policy.gpus_per_replica == 0:
        return [""]
    types = [node.gpu for node in allowed_nodes(view.observed.nodes, policy.template, policy.gpus_per_replica)]
    if types:
        return sorted(set(types), key=lambda name: (-types.count(name), name))
    # An autoscaler adds the nodes.
    selector = policy.template.spec.get("nodeSelector") or {}
    products = (selector.get(label) for label in labels.GPU_PRODUCTS)
    return [next((gpu_name(product) for product in products if isinstance(product, str)), "")]


def _takes_part(view: JobView) -> bool:
    """Injected faults show nothing about the memory of a shape."""
    return view.settings.memory_profiles != "Disabled" and view.job.spec.fault_injection == FaultInjection()


def _texts(held: MemoryProfileStatus) -> list[str]:
    """Return `microBatchTokens 2048` for each changed setting."""
    texts = texts_of(held.plan)
    settings = [change.remedy.setting for change in held.changes]
    return [f"{setting} {texts[setting]}" for setting in settings if setting in texts]


def _parsed(stored: StoredProfile | None) -> MemoryProfile | None:
    """Return the profile; None if there is none, or another version has written it."""
    if stored is None:
        return None
    try:
        return MemoryProfile.model_validate_json(stored.text, by_alias=True, by_name=False)
    except pydantic.ValidationError:
        return None


# --- The record ---


def record(view: JobView, draft: StatusDraft) -> tuple[Manifest | None, tuple[str, ...]]:
    """Return the MemoryProfile to write, and the names of those to delete with it; None, and no names, if the change
    from the stored status to the drafted one shows nothing new."""
    plan = draft.status.plan
    completes = draft.holds(ConditionType.COMPLETE) and not view.holds(ConditionType.COMPLETE)
    if plan is None or not (completes or _was_confirmed(view, draft)) or not _takes_part(view):
        return None, ()
    spec, observed = view.job.spec, view.observed
    gpu = _gpu_of_policy(view)
    name = profile_name(spec, gpu)
    before = _parsed(observed.profiles.get(name))
    if before and _has_expired(before.status.last_used_time, view.now):
        before = None
    held = _held(before.status if before else None, plan, completes, view, draft)
    if before and not _is_news(before.status, held):
        return None, ()
    manifest = {
        "apiVersion": API_VERSION,
        "kind": "MemoryProfile",
        "metadata": {"name": name, "namespace": observed.namespace, "labels": labels.OF_EVERY_OBJECT},
        "spec": _about(spec, gpu).model_dump(mode="json", by_alias=True),
        "status": held.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    others = {other: each.last_used_at for other, each in observed.profiles.items() if other != name}
    return manifest, _surplus(others, view.now)


def _was_confirmed(view: JobView, draft: StatusDraft) -> bool:
    """A step was committed under the latest change of the plan, and the stored status does not have that yet."""
    latest = latest_answer(draft.status.plan_changes)
    if latest is None or latest.seconds_to_recover is None:
        return False
    known = {change.generation for change in view.status.plan_changes if change.seconds_to_recover is not None}
    return latest.generation not in known


def _gpu_of_policy(view: JobView) -> str:
    """Return the product name of the GPUs that the policy has; that of most nodes if its pods are gone."""
    gpus = {node.name: node.gpu for node in view.observed.nodes}
    nodes = [pod.node for pod in view.pods if pod.role == "policy" and pod.node in gpus]
    return gpus[nodes[0]] if nodes and view.job.spec.policy.gpus_per_replica else possible_gpus(view)[0]


def _held(
    before: MemoryProfileStatus | None, plan: MemoryPlan, completes: bool, view: JobView, draft: StatusDraft
) -> MemoryProfileStatus:
    """Return the profile after this job: its own changes, and those of earlier jobs of other settings."""
    facts, uid = view.memory_facts, view.observed.uid
    if before is None or differences_of_shape(before.facts, facts):  # the model at this URI is another one
        before = MemoryProfileStatus(facts=facts, plan=plan, last_used_time=view.now)
    own = _own_changes(view, draft)
    others = {setting: change for setting, change in _by_setting(before.changes).items() if setting not in own}
    limited = within_limits(plan, before.plan, list(others.values()))
    changes = others | own
    peaks = _peaks([*(view.report.memory if view.report else ()), *before.peaks])
    return MemoryProfileStatus(
        facts=facts or before.facts,
        plan=limited.model_copy(update={"excluded_nodes": []}),
        changes=list(changes.values()),
        peaks=peaks,
        jobs=min(before.jobs + (completes and uid != before.last_job_uid), MAX_INTEGER),
        last_job_uid=uid if completes else before.last_job_uid,
        last_used_time=view.now,
        display=ProfileDisplay(peak=_peak_text(peaks), changes=", ".join(changes)),
    )


def _own_changes(view: JobView, draft: StatusDraft) -> dict[str, ProfileChange]:
    """Return the changes that the job started with, unless its trainer has ignored them, and those that it made."""
    start = draft.status.memory_profile
    followed = start is not None and not differences_of_shape(start.facts, view.memory_facts)
    made = [
        ProfileChange(
            class_name=change.diagnosis.class_name, role=change.role, phase=change.phase, remedy=change.remedy
        )
        for change in draft.status.plan_changes
        if change.diagnosis.class_name not in _OF_ANOTHER_CAUSE
    ]
    return _by_setting([*(start.changes if start and followed else ()), *made])


def _by_setting(changes: Sequence[ProfileChange]) -> dict[str, ProfileChange]:
    """Return one change for each setting of the shape, from its first value to its last, with its latest cause."""
    remedies = remedies_by_setting(changes)
    latest = {change.remedy.setting: change for change in changes if change.remedy.setting in _SETTINGS}
    return {setting: change.model_copy(update={"remedy": remedies[setting]}) for setting, change in latest.items()}


def _peaks(ranks: Iterable[RankMemory]) -> list[RankMemory]:
    """Return the process of each role with the largest peak."""
    largest: dict[str, RankMemory] = {}
    for rank in ranks:
        if rank.role not in largest or _peak_bytes(rank) > _peak_bytes(largest[rank.role]):
            largest[rank.role] = rank
    return [largest[role] for role in sorted(largest)]


def _peak_bytes(rank: RankMemory) -> int:
    return rank.peak_reserved_bytes if rank.device_total_bytes else rank.peak_rss_bytes


def _peak_text(peaks: Sequence[RankMemory]) -> str:
    on_gpus = [rank for rank in peaks if rank.device_total_bytes] or peaks
    return f"{max(map(_peak_bytes, on_gpus)) / GIB:.1f}Gi" if on_gpus else ""


def _is_news(before: MemoryProfileStatus, held: MemoryProfileStatus) -> bool:
    """Every job confirms the settings that it started with; under an unchanged plan, only a larger peak is new. What
    was written before the status, which then was not, is nothing new."""
    if held.last_used_time - before.last_used_time >= _RECORDED_EVERY:
        return True
    if held.changes:
        return (held.changes, held.jobs) != (before.changes, before.jobs)
    known = {rank.role: _peak_bytes(rank) for rank in before.peaks}
    return any(_peak_bytes(rank) > _MORE_MEMORY * known.get(rank.role, 0) for rank in held.peaks)


def _about(spec: RLJobSpec, gpu: str) -> MemoryProfileSpec:
    algorithm = spec.algorithm
    return MemoryProfileSpec(
        model=spec.model.uri,
        trainer=spec.trainer.image if spec.trainer else "",
        topology=spec.topology,
        gpu=gpu,
        gpus=sum(pods.replicas * pods.gpus for pods in worker_pods(spec)),
        prompts_per_step=algorithm.prompts_per_step,
        group_size=algorithm.group_size,
        max_prompt_tokens=algorithm.max_prompt_tokens,
        max_response_tokens=algorithm.max_response_tokens,
    )


def _surplus(last_used: dict[str, datetime], now: datetime) -> tuple[str, ...]:
    """Return the profiles to delete before another one is written: those that have expired, and the least recently used
    ones beyond the maximum; a few at a time."""
    oldest_first = sorted(last_used, key=lambda name: (last_used[name], name))
    too_many = len(oldest_first) + 1 - MAX_PROFILES
    surplus = [
        name for number, name in enumerate(oldest_first) if number < too_many or _has_expired(last_used[name], now)
    ]
    return tuple(surplus[:_MOST_DELETIONS])
