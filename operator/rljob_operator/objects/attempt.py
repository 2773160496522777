"""One attempt of a job, the input of all builders of objects, and the metadata of its objects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from rljob_api.job import RLJob, RLJobSpec, grown_spec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import StartingProfile
from rljob_api.metadata import API_VERSION
from rljob_api.plan_change import PlanChange
from rljob_api.roles import PodTemplate
from rljob_api.status import Role
from rljob_memory.budget import Budget
from rljob_operator import labels
from rljob_operator.objects.pod_layout import PodLayout, predict_memory
from rljob_operator.settings import OperatorSettings

ControllerPlacement = Literal["GpuFreeNodes", "UntaintedNodes", "AnyNode"]
Gang = Literal["Native", "Kueue", "Volcano"]

CONTAINER = "rljob"
"""Container of the trainer in every pod."""


def template_path(role: str) -> str:
    """Return the path of the template of a role in the manifest."""
    return f"spec.{role}.template"


@dataclass(frozen=True)
class JobAttempt:
    """A job, the number of the attempt, and everything else that its objects depend on."""

    job: RLJob
    settings: OperatorSettings
    namespace: str
    uid: str
    number: int
    """Number of the attempt, from 1."""
    plan: MemoryPlan | None
    """None until the trainer has reported its first plan."""
    controller_placement: ControllerPlacement
    gang: Gang
    plan_changes: tuple[PlanChange, ...] = ()
    """The latest changes of the plan, oldest first."""
    memory_profile: StartingProfile | None = None
    """The profile that the plan of generation 1 was made from."""
    restarts_in_place: bool = False
    """The nodes can restart all containers of a pod by a restart rule."""

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @cached_property
    def spec(self) -> RLJobSpec:
        """The job's, with the policy's size in the plan. The pods get the manifest of `job`."""
        return grown_spec(self.job.spec, self.plan)

    @property
    def own_trainer(self) -> bool:
        """RLJob's own trainer runs, with a controller pod; otherwise the image of `spec.trainer` runs alone."""
        return self.spec.trainer is None

    @property
    def serves_metrics(self) -> bool:
        """The controller's pod serves the metrics of the job."""
        return self.own_trainer and self.settings.job_metrics_token_sha256 != ""

    @property
    def torch_version(self) -> str | None:
        """torch in the worker pods; None if unknown."""
        return self.settings.trainer_torch_version if self.spec.trainer is None else self.spec.trainer.torch_version

    def template(self, role: Role) -> PodTemplate:
        """Return the user's overrides of the pods of a role."""
        return getattr(self.spec, role).template or PodTemplate()

    @property
    def gpu_resource(self) -> str:
        return self.settings.gpu_resources[0]

    @cached_property
    def layout(self) -> PodLayout:
        return PodLayout.of(self.spec)

    @cached_property
    def prediction(self) -> Budget | None:
        """Memory and disk that the pods are predicted to need; None if that is unknown."""
        return predict_memory(self.spec)


# --- Metadata of objects ---


Manifest = dict[str, Any]
"""A Kubernetes object as plain data."""


def job_labels(attempt: JobAttempt, component: str) -> dict[str, str]:
    """Return the labels of an object of `component`: a role, or `job` for what belongs to the job as a whole."""
    return {
        labels.JOB_NAME: attempt.name,
        labels.JOB_UID: attempt.uid,
        "app.kubernetes.io/instance": attempt.name,
        "app.kubernetes.io/component": component,
        **labels.OF_EVERY_OBJECT,
    }


def pod_labels(attempt: JobAttempt, role: Role) -> dict[str, str]:
    """Return the labels of the first pod of a role: those of the installation, and RLJob's own, which win."""
    return {
        **attempt.settings.pod_labels,
        **job_labels(attempt, role),
        labels.ROLE: role,
        labels.INDEX: "0",
        labels.ATTEMPT: str(attempt.number),
        labels.PLAN_GENERATION: str(attempt.plan.generation if attempt.plan else 1),
    }


def object_metadata(attempt: JobAttempt, name: str, component: str = "job") -> dict[str, Any]:
    """Return the metadata of an object that is deleted with the job."""
    owner = {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "name": attempt.name,
        "uid": attempt.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": attempt.namespace,
        "labels": job_labels(attempt, component),
        "ownerReferences": [owner],
    }


def job_object(attempt: JobAttempt, api_version: str, kind: str, name: str, **fields: Any) -> Manifest:
    """Return an object that is deleted with the job."""
    return {"apiVersion": api_version, "kind": kind, "metadata": object_metadata(attempt, name), **fields}


def shared_metadata(attempt: JobAttempt, name: str) -> dict[str, Any]:
    """Return the metadata of an object that all jobs of the namespace use: the same for all, without an owner."""
    shared = {**labels.OF_EVERY_OBJECT, labels.SHARED: "true"}
    return {"name": name, "namespace": attempt.namespace, "labels": shared}


def is_shared(manifest: Manifest) -> bool:
    """Return True for an object that all jobs of the namespace use."""
    return labels.SHARED in (manifest["metadata"].get("labels") or {})
