"""All objects of one attempt of a job."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rljob_api.job import RLJob
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_api.quantity import shown
from rljob_api.roles import PodTemplate
from rljob_api.status import Role
from rljob_memory.allocator import allocator_environment
from rljob_operator import labels, names
from rljob_operator.event_note import EventNote
from rljob_operator.objects.accounts import build_account
from rljob_operator.objects.allocator_override import RoleAllocator, role_allocator
from rljob_operator.objects.attempt import ControllerPlacement, Gang, JobAttempt
from rljob_operator.objects.container_resources import require_quantities
from rljob_operator.objects.gang_scheduling import build_pod_group, group_pod, queue_pod
from rljob_operator.objects.invalid_template import InvalidTemplate
from rljob_operator.objects.metadata import Manifest
from rljob_operator.objects.placement import keep_off, place_controller, tolerate_gpu_nodes
from rljob_operator.objects.pod_layout import WorkerGroup
from rljob_operator.objects.pod_resources import give_planned_memory, give_predicted_limit, refuse_gpus, require_gpus
from rljob_operator.objects.pod_template import merge_template, role_of
from rljob_operator.objects.pod_volumes import has_plan_file
from rljob_operator.objects.pods import at_index, build_controller_pod, build_worker_pod
from rljob_operator.objects.probe import add_probe
from rljob_operator.objects.required_objects import RequiredObject, required_objects
from rljob_operator.objects.supporting_objects import (
    build_checkpoint_claim,
    build_config_map,
    build_network_policy,
    build_ray_token_secret,
    build_service,
    build_step_report,
)
from rljob_operator.settings import OperatorSettings

MAX_BYTES_OF_A_POD = 256 << 10
"""Of JSON. Parsed, a pod takes up to sixteen times as much memory, and 24 requests are under way at once."""

MAX_BYTES_OF_ALL_PODS = 32 << 20
"""Of JSON, for one job: 1,024 pods of 32 KiB. etcd stores 2 GiB by default, for the whole cluster."""


@dataclass(frozen=True, slots=True)
class JobObjects:
    require: tuple[RequiredObject, ...]
    """Objects of the user that the pods need."""
    apply: tuple[Manifest, ...]
    """Objects that follow the job and its plan."""
    create: tuple[Manifest, ...]
    """Objects that are created once, because others write to them: a token, a report, checkpoints."""
    pods: tuple[Manifest, ...]
    """Pods, the controller first; created after the other objects."""
    notices: tuple[EventNote, ...]
    """Events about the templates."""


def build_job_objects(
    job: RLJob,
    settings: OperatorSettings,
    *,
    namespace: str,
    uid: str,
    attempt: int,
    plan: MemoryPlan | None,
    plan_changes: Sequence[PlanChange] = (),
    restarts_in_place: bool = False,
    controller_placement: ControllerPlacement,
    gang: Gang,
    ray_token: str,
) -> JobObjects:
    """Build all objects of an attempt.

    `plan`: None until the trainer has reported its first plan. `ray_token`: for a Secret that does not exist yet.
    Raises InvalidTemplate if the manifest cannot be turned into pods.
    """
    this = JobAttempt(
        job,
        settings,
        namespace,
        uid,
        attempt,
        plan,
        controller_placement,
        gang,
        tuple(plan_changes),
        restarts_in_place,
    )
    try:
        return _build(this, ray_token)
    except InvalidTemplate:
        raise
    except Exception as error:
        path = _part_at_fault(this, ray_token)
        if path is None:
            raise
        raise InvalidTemplate(
            f"{path}: expected fields as in `kubectl explain pod.spec`, found a value that cannot be used "
            f"({type(error).__name__}: {shown(str(error))}); correct or remove it"
        ) from error


_FREE_PARTS: dict[str, tuple[str, str, Any]] = {
    "spec.controller.template": ("controller", "template", PodTemplate()),
    "spec.policy.template": ("policy", "template", PodTemplate()),
    "spec.rollout.template": ("rollout", "template", None),
    "spec.checkpoint.volume": ("checkpoint", "volume", None),
}
"""Parts of a job that may have any content, with the field and its default."""


def _part_at_fault(this: JobAttempt, ray_token: str) -> str | None:
    """Path of the first free part with which the objects cannot be built; None if they cannot be built without any
    free part either: then it is a bug of RLJob."""
    if not _can_be_built(this, (), ray_token):
        return None
    return next((path for path in _FREE_PARTS if not _can_be_built(this, (path,), ray_token)), "spec")


def _can_be_built(this: JobAttempt, kept: Collection[str], ray_token: str) -> bool:
    """True if the objects can be built with these of the free parts."""
    spec = this.job.spec
    for path, (part, name, default) in _FREE_PARTS.items():
        if path not in kept:
            spec = spec.model_copy(update={part: getattr(spec, part).model_copy(update={name: default})})
    try:
        _build(replace(this, job=this.job.model_copy(update={"spec": spec})), ray_token)
    except Exception:
        return False
    return True


def _build(this: JobAttempt, ray_token: str) -> JobObjects:
    allocators = {group.role: role_allocator(this, group) for group in this.layout.workers}
    roles = _roles(this, allocators)
    return JobObjects(
        require=required_objects(this),
        apply=tuple(_applied(this, allocators, roles)),
        create=tuple(_created(this, ray_token)),
        pods=tuple(at_index(role.pod, index, name) for role in roles for index, name in enumerate(role.names)),
        notices=tuple(_notices(this, allocators)),
    )


@dataclass(frozen=True, slots=True)
class _RolePods:
    """Pods of one role, which differ in name and index alone."""

    pod: Manifest
    """The first one."""
    names: list[str]


def _roles(this: JobAttempt, allocators: dict[Role, RoleAllocator]) -> list[_RolePods]:
    """The pods of each role, the controller first. Raises InvalidTemplate, also if all pods together are too large."""
    roles = [_RolePods(_controller_pod(this), [names.controller_pod_name(this.name)])] if this.own_trainer else []
    for group in this.layout.workers:
        own_names = [names.worker_pod_name(this.name, group.role, index) for index in range(group.replicas)]
        roles.append(_RolePods(_worker_pod(this, group, allocators[group.role]), own_names))
    left_bytes = MAX_BYTES_OF_ALL_PODS
    for role in roles:
        _join_gang(this, role.pod)
        left_bytes -= _note_spec(role.pod) * len(role.names)
        require_quantities(role.pod["spec"], f"spec.{role_of(role.pod)}.template.spec")
    if left_bytes < 0:
        raise InvalidTemplate(
            f"spec: expected at most {MAX_BYTES_OF_ALL_PODS >> 20} MiB for the manifests of all pods together, found "
            f"{math.ceil((MAX_BYTES_OF_ALL_PODS - left_bytes) / (1 << 20))} MiB; shorten the templates and spec.env, "
            "put long texts into a ConfigMap that the pods mount, or use fewer replicas"
        )
    return roles


def _controller_pod(this: JobAttempt) -> Manifest:
    path = "spec.controller.template"
    pod = merge_template(build_controller_pod(this), this.spec.controller.template, path)
    refuse_gpus(this, pod, path)
    place_controller(pod["spec"], this.controller_placement, this.gpu_resource, f"{path}.spec")
    give_planned_memory(pod, this.plan, f"{path}.spec")
    return pod


def _worker_pod(this: JobAttempt, group: WorkerGroup, allocator: RoleAllocator) -> Manifest:
    pod = merge_template(build_worker_pod(this, group, allocator.environment), allocator.template, group.path)
    require_gpus(this, group, pod)
    give_predicted_limit(pod, this.spec, group)
    add_probe(this, pod)
    if has_plan_file(this):
        assert this.plan is not None
        _annotate(pod, labels.MEMORY_PLAN, this.plan.model_dump_json(by_alias=True))
    if group.gpus:
        tolerate_gpu_nodes(pod["spec"], this.gpu_resource, f"{group.path}.spec")
    if this.plan is not None:
        keep_off(pod["spec"], this.plan.excluded_nodes, f"{group.path}.spec")
    give_planned_memory(pod, this.plan, f"{group.path}.spec")
    return pod


def _join_gang(this: JobAttempt, pod: Manifest) -> None:
    match this.gang:
        case "Kueue":
            queue_pod(this, pod)
        case "Volcano":
            group_pod(this, pod)
        case "Native":
            pass  # the operator itself releases pods that cannot all be placed


def _note_spec(pod: Manifest) -> int:
    """Annotate the digest of the spec, and return the size of the pod in bytes of JSON. Raises InvalidTemplate if that
    is more than one pod may have."""
    spec = json.dumps(pod["spec"], sort_keys=True)
    _annotate(pod, labels.SPEC_DIGEST, hashlib.sha256(spec.encode()).hexdigest()[:16])
    size_bytes = len(spec) + len(json.dumps(pod["metadata"]))
    if size_bytes > MAX_BYTES_OF_A_POD:
        raise InvalidTemplate(
            f"spec.{role_of(pod)}.template: expected at most {MAX_BYTES_OF_A_POD >> 10} KiB for the manifest of a pod, "
            f"found {math.ceil(size_bytes / 1024)} KiB; shorten the template and spec.env, and put long texts into a "
            "ConfigMap that the pods mount"
        )
    return size_bytes


def _annotate(pod: Manifest, name: str, value: str) -> None:
    """After the user's template, whose value never counts."""
    pod["metadata"]["annotations"] = {**(pod["metadata"].get("annotations") or {}), name: value}


def _applied(this: JobAttempt, allocators: dict[Role, RoleAllocator], roles: list[_RolePods]) -> list[Manifest]:
    objects = [_config_map(this, allocators), build_service(this)]
    if this.own_trainer:
        objects += build_account(this)
    if this.settings.network_policy:
        objects.append(build_network_policy(this))
    if this.gang == "Volcano":
        objects.append(build_pod_group(this, [(role.pod, len(role.names)) for role in roles]))
    return objects


def _created(this: JobAttempt, ray_token: str) -> list[Manifest]:
    objects = [build_ray_token_secret(this, ray_token), build_step_report(this)] if this.own_trainer else []
    if this.spec.checkpoint.volume is None:
        objects.append(build_checkpoint_claim(this))
    return objects


def _config_map(this: JobAttempt, allocators: dict[Role, RoleAllocator]) -> Manifest:
    """Colocated engines live in the policy's pods, and have no template of their own."""
    if not this.own_trainer:
        return build_config_map(this, None, None)
    rollout = allocators.get("rollout")
    rollout_environment = (
        rollout.environment
        if rollout is not None
        else allocator_environment("rollout", this.settings.trainer_torch_version)
    )
    return build_config_map(this, allocators["policy"].environment, rollout_environment)


def _notices(this: JobAttempt, allocators: dict[Role, RoleAllocator]) -> list[EventNote]:
    notices = [notice for allocator in allocators.values() for notice in allocator.notices]
    if "emptyDir" in (this.spec.checkpoint.volume or {}):
        notices.append(
            EventNote(
                "Warning",
                "CheckpointVolumeNotShared",
                "spec.checkpoint.volume is an emptyDir, which is deleted with its pod, so a restarted job begins at "
                "step 1; delete the job and create it again with a volume that all pods share, or without the field: "
                "then the operator creates a claim",
            )
        )
    return notices
