"""Jobs, and the objects that are built for them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rljob_api.job import RLJob
from rljob_api.plan_change import PlanChange
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.job_objects import JobObjects, build_job_objects
from rljob_operator.settings import OperatorSettings
from rljob_testing.memory_plans import memory_plan

Object = dict[str, Any]

NAMESPACE = "research"
UID = "5f0c1c9a-0f3c-4d55-9f3b-6f2f3a3d6f10"

COMMON_LABELS = {
    "rljob.dev/job-name": "sums",
    "rljob.dev/job-uid": UID,
    "app.kubernetes.io/name": "rljob",
    "app.kubernetes.io/instance": "sums",
    "app.kubernetes.io/part-of": "rljob",
    "app.kubernetes.io/managed-by": "rljob-operator",
}
"""Labels of every object of the job `sums`."""

PLAN = memory_plan(generation=3)

CHANGE = PlanChange.model_validate(
    {
        "generation": 3,
        "time": datetime(2026, 1, 1, tzinfo=UTC),
        "attempt": 1,
        "step": 2,
        "role": "policy",
        "diagnosis": {"class": "ActivationSpike", "confidence": 0.9, "message": "one pass needs more than is left"},
        "remedy": {"setting": "microBatchTokens", "before": "8192", "after": "4096"},
        "level": "ReplacePods",
    }
)


def job(name: str = "sums", metadata: Object | None = None, **spec: Any) -> RLJob:
    """A small valid job; `spec` adds to its spec, in the spelling of the manifest."""
    manifest = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name, **(metadata or {})},
        "spec": {
            "model": {"uri": "hf://org/name"},
            "task": {"name": "digits"},
            "algorithm": {"steps": 3},
            **spec,
        },
    }
    return RLJob.model_validate(manifest, by_alias=True, by_name=False)


def settings(**given: Any) -> OperatorSettings:
    return OperatorSettings(**{"trainer_image": "registry/rljob/trainer:1", "trainer_torch_version": "2.13.0", **given})


def objects(of: RLJob, with_settings: OperatorSettings | None = None, **given: Any) -> JobObjects:
    """`given`: what differs from the first attempt of a job on an ordinary cluster."""
    arguments: Object = {
        "namespace": NAMESPACE,
        "uid": UID,
        "number": 1,
        "plan": None,
        "controller_placement": "GpuFreeNodes",
        "gang": "Native",
    }
    ray_token = given.pop("ray_token", "a-token")
    return build_job_objects(JobAttempt(of, with_settings or settings(), **(arguments | given)), ray_token)


def of_kind(kind: str, built: JobObjects) -> Object:
    (found,) = (o for o in (*built.apply, *built.create) if o["kind"] == kind)
    return found


def pod_of(built: JobObjects, role: str, index: int = 0) -> Object:
    (found,) = (
        pod
        for pod in built.pods
        if pod["metadata"]["labels"]["rljob.dev/role"] == role
        and pod["metadata"]["labels"]["rljob.dev/index"] == str(index)
    )
    return found


def container_of(pod: Object, name: str = "rljob") -> Object:
    found: Object
    (found,) = (container for container in pod["spec"]["containers"] if container["name"] == name)
    return found


def environment_of(pod: Object) -> dict[str, str]:
    """The variables of the container `rljob` that have a value of their own."""
    return {entry["name"]: entry["value"] for entry in container_of(pod)["env"] if "value" in entry}


def references_of(pod: Object) -> dict[str, Object]:
    """The variables of the container `rljob` that come from elsewhere."""
    return {entry["name"]: entry["valueFrom"] for entry in container_of(pod)["env"] if "valueFrom" in entry}


def volumes_of(pod: Object) -> dict[str, Object]:
    return {volume["name"]: volume for volume in pod["spec"]["volumes"]}


def mounts_of(pod: Object) -> dict[str, Object]:
    """The mounts of the container `rljob` by name, without those of a template whose name is no text."""
    return {mount["name"]: mount for mount in container_of(pod)["volumeMounts"] if isinstance(mount["name"], str)}


DISAGGREGATED: Object = {
    "topology": "Disaggregated",
    "policy": {"replicas": 2, "gpusPerReplica": 4},
    "rollout": {"replicas": 3, "gpusPerReplica": 2},
}
OTHER_TRAINER: Object = {
    "trainer": {"image": "verl:1", "command": ["torchrun"], "args": ["train.py"]},
    "policy": {"replicas": 2, "gpusPerReplica": 8},
}
