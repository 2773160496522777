"""All objects of one attempt of a job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api.job import RLJob
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_api.status import Role
from rljob_memory.allocator import allocator_environment
from rljob_operator import labels
from rljob_operator.event_note import EventNote
from rljob_operator.objects.accounts import build_account
from rljob_operator.objects.allocator_override import RoleAllocator, role_allocator
from rljob_operator.objects.attempt import ControllerPlacement, Gang, JobAttempt
from rljob_operator.objects.gang_scheduling import build_pod_group, group_pod, queue_pod
from rljob_operator.objects.metadata import Manifest
from rljob_operator.objects.placement import keep_off, place_controller, tolerate_gpu_nodes
from rljob_operator.objects.pod_layout import WorkerGroup
from rljob_operator.objects.pod_resources import give_planned_memory, give_predicted_limit, refuse_gpus, require_gpus
from rljob_operator.objects.pod_template import merge_template
from rljob_operator.objects.pod_volumes import has_plan_file
from rljob_operator.objects.pods import build_controller_pod, build_worker_pod
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
    allocators = {group.role: role_allocator(this, group) for group in this.layout.workers}
    pods = [*_controller_pods(this), *_worker_pods(this, allocators)]
    for pod in pods:
        _join_gang(this, pod)
        _note_spec(pod)
    return JobObjects(
        require=required_objects(this),
        apply=tuple(_applied(this, allocators, pods)),
        create=tuple(_created(this, ray_token)),
        pods=tuple(pods),
        notices=tuple(_notices(this, allocators)),
    )


def _controller_pods(this: JobAttempt) -> list[Manifest]:
    if not this.own_trainer:
        return []
    path = "spec.controller.template"
    pod = merge_template(build_controller_pod(this), this.spec.controller.template, path)
    refuse_gpus(this, pod, path)
    place_controller(pod["spec"], this.controller_placement, this.gpu_resource, f"{path}.spec")
    give_planned_memory(pod, this.plan, f"{path}.spec")
    return [pod]


def _worker_pods(this: JobAttempt, allocators: dict[Role, RoleAllocator]) -> list[Manifest]:
    return [
        _worker_pod(this, group, index, allocators[group.role])
        for group in this.layout.workers
        for index in range(group.replicas)
    ]


def _worker_pod(this: JobAttempt, group: WorkerGroup, index: int, allocator: RoleAllocator) -> Manifest:
    pod = merge_template(build_worker_pod(this, group, index, allocator.environment), allocator.template, group.path)
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


def _note_spec(pod: Manifest) -> None:
    text = json.dumps(pod["spec"], sort_keys=True)
    _annotate(pod, labels.SPEC_DIGEST, hashlib.sha256(text.encode()).hexdigest()[:16])


def _annotate(pod: Manifest, name: str, value: str) -> None:
    """After the user's template, whose value never counts."""
    pod["metadata"]["annotations"] = {**(pod["metadata"].get("annotations") or {}), name: value}


def _applied(this: JobAttempt, allocators: dict[Role, RoleAllocator], pods: list[Manifest]) -> list[Manifest]:
    objects = [_config_map(this, allocators), build_service(this)]
    if this.own_trainer:
        objects += build_account(this)
    if this.settings.network_policy:
        objects.append(build_network_policy(this))
    if this.gang == "Volcano":
        objects.append(build_pod_group(this, pods))
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
