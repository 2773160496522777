"""Pods, GPUs and ranks of one attempt of a job: the only place that derives them from the spec."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.job import RLJobSpec
from rljob_api.roles import PodTemplate
from rljob_api.status import Role
from rljob_api.topology import worker_pods
from rljob_operator.names import controller_pod_name, worker_pod_name


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Worker pods that differ only in their index."""

    role: Role
    """Role of the pods: policy, or rollout if engines have pods of their own."""

    replicas: int

    gpus: int
    """GPUs of each pod."""

    processes: int
    """Processes of the role in each pod."""

    template: PodTemplate
    """Overrides by the user."""

    @property
    def path(self) -> str:
        """Path of the template in the manifest."""
        return f"spec.{self.role}.template"


@dataclass(frozen=True, slots=True)
class PodLayout:
    """Pods of an attempt, and the processes in them."""

    workers: tuple[WorkerGroup, ...]
    """Policy pods first."""

    has_controller: bool
    """RLJob's own trainer runs in the pods; another trainer has no controller pod."""

    gpus_of_an_engine: int
    """GPUs that report as one rank of the rollout: `tensorParallelSize` of another trainer; 1 of RLJob's own, which has
    a process for each."""

    @classmethod
    def of(cls, spec: RLJobSpec) -> PodLayout:
        own_trainer = spec.trainer is None
        templates = {"policy": spec.policy.template, "rollout": spec.rollout.template or PodTemplate()}
        # Another trainer runs all of its processes in the policy's pods.
        pods = worker_pods(spec) if own_trainer else worker_pods(spec)[:1]
        groups = tuple(
            WorkerGroup(of.role, of.replicas, of.gpus, of.processes_per_pod, templates[of.role]) for of in pods
        )
        return cls(groups, own_trainer, 1 if own_trainer else spec.rollout.tensor_parallel_size)

    @property
    def worker_count(self) -> int:
        return sum(group.replicas for group in self.workers)

    @property
    def policy_ranks(self) -> int:
        """Ranks of the policy in all pods; each has a GPU, if the pods have any."""
        return self.workers[0].replicas * self.workers[0].processes

    @property
    def pod_count(self) -> int:
        return self.worker_count + self.has_controller

    @property
    def worker_gpus(self) -> list[int]:
        """GPUs of each worker pod."""
        return [group.gpus for group in self.workers for _ in range(group.replicas)]

    def pods(self, job: str) -> list[tuple[str, Role]]:
        """Name and role of each pod, the controller first. All attempts have the same names: two never run at once."""
        controller: list[tuple[str, Role]] = [(controller_pod_name(job), "controller")] if self.has_controller else []
        return controller + [
            (worker_pod_name(job, group.role, index), group.role)
            for group in self.workers
            for index in range(group.replicas)
        ]

    def first_rank(self, role: Role, index: int) -> int:
        """Rank of the first process of the pod's own role in pod `index` of `role`; pods are filled in order."""
        return index * self._processes_per_pod(role)

    def pod_of(self, role: Role, rank: int) -> tuple[Role, int]:
        """Role and index of the pod that contains process `rank` of `role`."""
        if role == "controller":
            return role, 0
        return self._group_of(role).role, rank // self._processes_per_pod(role)

    def _processes_per_pod(self, role: Role) -> int:
        """Processes of `role` in each of its pods, as they are numbered in reports."""
        if role == "controller":
            return 1
        return max(self._group_of(role).processes // (self.gpus_of_an_engine if role == "rollout" else 1), 1)

    def _group_of(self, role: Role) -> WorkerGroup:
        """The pods that contain the processes of `role`. Colocated engines are in the policy's pods."""
        return next((group for group in self.workers if group.role == role), self.workers[0])
