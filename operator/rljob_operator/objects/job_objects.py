"""All objects of one attempt of a job."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rljob_api.quantity import shown
from rljob_api.topology import WorkerPods
from rljob_memory.allocator import allocator_environment
from rljob_operator import labels, names
from rljob_operator.events import EventNote
from rljob_operator.objects.allocator import allocator_of, default_allocator, settle_allocator
from rljob_operator.objects.attempt import JobAttempt, Manifest, template_path
from rljob_operator.objects.placement import (
    build_pod_group,
    exclude_nodes,
    join_kueue_group,
    join_volcano_group,
    place_controller,
    tolerate_gpu_nodes,
)
from rljob_operator.objects.pod_resources import (
    enlarge_shared_memory,
    raise_memory_limit,
    refuse_gpus,
    require_gpus,
    set_predicted_limit,
)
from rljob_operator.objects.pod_template import merge_template, role_of
from rljob_operator.objects.pod_volumes import has_plan_file
from rljob_operator.objects.pods import at_index, build_controller_pod, build_worker_pod
from rljob_operator.objects.probe import add_probe
from rljob_operator.objects.strategic_merge import InvalidTemplate
from rljob_operator.objects.supporting_objects import applied_objects, created_objects

MAX_BYTES_OF_A_POD = 256 << 10
"""Size as JSON. Parsed, a pod takes up to sixteen times as much memory, and 24 requests are under way at once."""

MAX_BYTES_OF_ALL_PODS = 32 << 20
"""Size as JSON for one job: 1,024 pods of 32 KiB. etcd stores 2 GiB by default, for the whole cluster."""


@dataclass(frozen=True, slots=True)
class JobObjects:
    required_config_map: str | None
    """ConfigMap of the user that the pods mount."""
    apply: tuple[Manifest, ...]
    """Objects that follow the job and its plan."""
    create: tuple[Manifest, ...]
    """Objects that are created once, because others write to them: a token, a report, checkpoints."""
    pods: tuple[Manifest, ...]
    """Pods, the controller first; created after the other objects."""
    notices: tuple[EventNote, ...]
    """Events about the templates."""


def build_job_objects(attempt: JobAttempt, ray_token: str) -> JobObjects:
    """Build all objects of an attempt. `ray_token`: for a Secret that does not exist yet.

    Raises InvalidTemplate if the manifest cannot be turned into pods.
    """
    try:
        return _build(attempt, ray_token)
    except InvalidTemplate:
        raise
    except Exception as error:
        path = _part_at_fault(attempt, ray_token)
        if path is None:
            raise
        raise InvalidTemplate(
            f"{path}: expected fields as in `kubectl explain pod.spec`, found a value that cannot be used "
            f"({type(error).__name__}: {shown(str(error))}); correct or remove it"
        ) from error


_FREE_PARTS = ("spec.controller.template", "spec.policy.template", "spec.rollout.template", "spec.checkpoint.volume")
"""Parts of a job that may have any content."""


def _part_at_fault(attempt: JobAttempt, ray_token: str) -> str | None:
    """Return the path of the first free part with which the objects cannot be built; None if they cannot be built
    without any free part either: then it is a bug of RLJob."""
    if not _can_be_built(attempt, "", ray_token):
        return None
    return next((path for path in _FREE_PARTS if not _can_be_built(attempt, path, ray_token)), "spec")


def _can_be_built(attempt: JobAttempt, kept: str, ray_token: str) -> bool:
    spec = attempt.job.spec
    for path in _FREE_PARTS:
        _, name, field = path.split(".")
        part = getattr(spec, name)
        default = type(part).model_fields[field].get_default(call_default_factory=True)
        if path != kept:
            spec = spec.model_copy(update={name: part.model_copy(update={field: default})})
    try:
        _build(replace(attempt, job=attempt.job.model_copy(update={"spec": spec})), ray_token)
    except Exception:
        return False
    return True


def _build(attempt: JobAttempt, ray_token: str) -> JobObjects:
    roles = _build_roles(attempt)
    allocators = {role_of(role.pod): allocator_of(role.pod) for role in roles}
    # Colocated engines run in the policy's pods, and have no template of their own.
    if attempt.own_trainer and "rollout" not in allocators:
        allocators["rollout"] = allocator_environment("rollout", attempt.settings.trainer_torch_version)
    applied = applied_objects(attempt, allocators)
    if attempt.gang == "Volcano":
        applied.append(build_pod_group(attempt, [(role.pod, len(role.names)) for role in roles]))
    files = attempt.spec.task.files
    return JobObjects(
        required_config_map=files.config_map if files else None,
        apply=tuple(applied),
        create=tuple(created_objects(attempt, ray_token)),
        pods=tuple(at_index(role.pod, index, name) for role in roles for index, name in enumerate(role.names)),
        notices=tuple(note for role in roles for note in role.notices) + _volume_notices(attempt),
    )


@dataclass(frozen=True, slots=True)
class _RolePods:
    """Pods of one role, which differ in name and index alone."""

    pod: Manifest
    """The first one."""
    names: list[str]
    notices: Sequence[EventNote] = ()


def _build_roles(attempt: JobAttempt) -> list[_RolePods]:
    """Build the pods of each role, the controller first. Raises InvalidTemplate, also if all pods together are too
    large."""
    roles = [_build_controller(attempt)] if attempt.own_trainer else []
    roles += [_build_workers(attempt, group) for group in attempt.layout.workers]
    left_bytes = MAX_BYTES_OF_ALL_PODS
    for role in roles:
        enlarge_shared_memory(role.pod, attempt)
        match attempt.gang:
            case "Kueue":
                join_kueue_group(attempt, role.pod)
            case "Volcano":
                join_volcano_group(attempt, role.pod)
            case "Native":
                pass  # the operator itself releases pods that cannot all be placed
        left_bytes -= _finish(role.pod) * len(role.names)
        raise_memory_limit(role.pod, attempt)  # not in the digest: running pods get it, too
    if left_bytes < 0:
        raise InvalidTemplate(
            f"spec: expected at most {MAX_BYTES_OF_ALL_PODS >> 20} MiB for the manifests of all pods together, found "
            f"{math.ceil((MAX_BYTES_OF_ALL_PODS - left_bytes) / (1 << 20))} MiB; shorten the templates and spec.env, "
            "put long texts into a ConfigMap that the pods mount, or use fewer replicas"
        )
    return roles


def _build_controller(attempt: JobAttempt) -> _RolePods:
    path = template_path("controller")
    pod = merge_template(build_controller_pod(attempt), attempt.template("controller"), path)
    refuse_gpus(attempt, pod, path)
    place_controller(pod["spec"], attempt.controller_placement, attempt.gpu_resource)
    return _RolePods(pod, [names.controller_pod_name(attempt.name)])


def _build_workers(attempt: JobAttempt, group: WorkerPods) -> _RolePods:
    before = build_worker_pod(attempt, group, default_allocator(attempt, group))
    pod = merge_template(before, attempt.template(group.role), template_path(group.role))
    require_gpus(attempt, group, pod)
    notices = settle_allocator(attempt, group, before, pod)
    set_predicted_limit(pod, attempt, group)
    add_probe(attempt, pod)
    if attempt.plan is not None:
        exclude_nodes(pod["spec"], attempt.plan.excluded_nodes)
        if has_plan_file(attempt):
            _annotate(pod, labels.MEMORY_PLAN, attempt.plan.model_dump_json(by_alias=True))
    if group.gpus:
        tolerate_gpu_nodes(pod["spec"], attempt.gpu_resource)
    all_names = [names.worker_pod_name(attempt.name, group.role, index) for index in range(group.replicas)]
    return _RolePods(pod, all_names, notices)


def _finish(pod: Manifest) -> int:
    """Annotate the digest of the spec, and return the size of the pod in bytes of JSON. Raises InvalidTemplate if that
    is more than one pod may have."""
    spec = json.dumps(pod["spec"], sort_keys=True)
    _annotate(pod, labels.SPEC_DIGEST, hashlib.sha256(spec.encode()).hexdigest()[:16])
    size_bytes = len(spec) + len(json.dumps(pod["metadata"]))
    if size_bytes > MAX_BYTES_OF_A_POD:
        raise InvalidTemplate(
            f"{template_path(role_of(pod))}: expected at most {MAX_BYTES_OF_A_POD >> 10} KiB for the manifest of a "
            f"pod, found {math.ceil(size_bytes / 1024)} KiB; shorten the template and spec.env, and put long texts "
            "into a ConfigMap that the pods mount"
        )
    return size_bytes


def _annotate(pod: Manifest, name: str, value: str) -> None:
    """Set an annotation of a pod after the merge with the user's template, so that the value there never counts."""
    pod["metadata"]["annotations"] = {**(pod["metadata"].get("annotations") or {}), name: value}


def _volume_notices(attempt: JobAttempt) -> tuple[EventNote, ...]:
    if "emptyDir" not in (attempt.spec.checkpoint.volume or {}):
        return ()
    message = (
        "spec.checkpoint.volume is an emptyDir, which is deleted with its pod, so a restarted job begins at step 1; "
        "delete the job and create it again with a volume that all pods share, or without the field: then the operator "
        "creates a claim"
    )
    return (EventNote("Warning", "CheckpointVolumeNotShared", message),)
