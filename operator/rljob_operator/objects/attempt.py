"""One attempt of a job: everything that its objects are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rljob_api.job import RLJob, RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_api.pod_template import PodTemplate
from rljob_api.status import Role
from rljob_operator.settings import OperatorSettings

ControllerPlacement = Literal["GpuFreeNodes", "AnyNode"]
Gang = Literal["Native", "Kueue", "Volcano"]


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Worker pods that are alike but for their index. `path`: of the template in the manifest."""

    role: Role
    replicas: int
    gpus: int
    """GPUs of a pod."""
    template: PodTemplate
    path: str


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """`plan`: None while the trainer has not worked out the first one. `plan_changes`: the latest, oldest first.

    `restarts_in_place`: the nodes know how to restart all containers of a pod that asks for it.
    """

    job: RLJob
    settings: OperatorSettings
    namespace: str
    uid: str
    number: int
    plan: MemoryPlan | None
    controller_placement: ControllerPlacement
    gang: Gang
    plan_changes: tuple[PlanChange, ...] = ()
    restarts_in_place: bool = False

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def spec(self) -> RLJobSpec:
        return self.job.spec

    @property
    def own_trainer(self) -> bool:
        """Whether RLJob's own trainer runs, with its controller; otherwise the image of `spec.trainer` runs alone."""
        return self.spec.trainer is None

    @property
    def torch_version(self) -> str | None:
        """torch in the worker pods; None where it is not known."""
        return self.settings.trainer_torch_version if self.spec.trainer is None else self.spec.trainer.torch_version

    @property
    def gpu_resource(self) -> str:
        return self.settings.gpu_resources[0]

    def worker_groups(self) -> list[WorkerGroup]:
        policy, rollout = self.spec.policy, self.spec.rollout
        groups = [
            WorkerGroup("policy", policy.replicas, policy.gpus_per_replica, policy.template, "spec.policy.template")
        ]
        if self.spec.topology == "Disaggregated" and self.own_trainer:
            gpus = 1 if rollout.gpus_per_replica is None else rollout.gpus_per_replica
            template = rollout.template or PodTemplate()
            groups.append(WorkerGroup("rollout", rollout.replicas or 1, gpus, template, "spec.rollout.template"))
        return groups

    @property
    def workers(self) -> int:
        """Worker pods, of all roles."""
        return sum(group.replicas for group in self.worker_groups())

    @property
    def pods(self) -> int:
        return self.workers + self.own_trainer
