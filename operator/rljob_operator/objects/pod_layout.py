"""Pods of a job, their GPUs, ranks and predicted memory, derived from its spec alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_api.job import RLJobSpec
from rljob_api.quantity import byte_quantity, quantity_bytes
from rljob_api.status import Role
from rljob_api.topology import WorkerPods, worker_pods
from rljob_memory.budget import Budget, Pod
from rljob_memory.budget.host import processes_bytes
from rljob_memory.hardware import DeviceKind
from rljob_memory.model_shape import compute_bytes, shape_in_uri
from rljob_memory.pod_memory import (
    limit_bytes,
    low_limits,
    memory_limit_in,
    predicted_budget,
    request_bytes,
    resources_in,
)
from rljob_memory.workload import workload_of
from rljob_operator.names import controller_pod_name, worker_pod_name


@dataclass(frozen=True, slots=True)
class PodLayout:
    """Pods of an attempt, and the processes in them."""

    workers: tuple[WorkerPods, ...]
    """Policy pods first."""
    has_controller: bool
    """RLJob's own trainer runs in the pods; another trainer has no controller pod."""
    gpus_per_engine: int
    """GPUs that report as one rank of the rollout: `tensorParallelSize` of another trainer; 1 of RLJob's own, which has
    a process for each."""

    @classmethod
    def of(cls, spec: RLJobSpec) -> PodLayout:
        if spec.trainer is None:
            return cls(worker_pods(spec), has_controller=True, gpus_per_engine=1)
        # Another trainer runs all of its processes in the policy's pods.
        return cls(worker_pods(spec)[:1], has_controller=False, gpus_per_engine=spec.rollout.given_tensor_parallel_size)

    @property
    def worker_count(self) -> int:
        return sum(group.replicas for group in self.workers)

    @property
    def policy_ranks(self) -> int:
        """Ranks of the policy in all pods; each has a GPU, if the pods have any."""
        return self.workers[0].processes

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
        return max(self._group_of(role).processes_per_pod // (self.gpus_per_engine if role == "rollout" else 1), 1)

    def _group_of(self, role: Role) -> WorkerPods:
        """The pods that contain the processes of `role`. Colocated engines are in the policy's pods."""
        return next((group for group in self.workers if group.role == role), self.workers[0])


# --- Predicted memory ---


def predict_memory(spec: RLJobSpec) -> Budget | None:
    """Return the prediction; None for another trainer, and for a model whose size is not in its URI."""
    if spec.trainer is not None:
        return None
    device = _device(spec)
    shape = shape_in_uri(spec, compute_bytes(spec, device))
    return None if shape is None else predicted_budget(spec, shape, device)


def _device(spec: RLJobSpec) -> DeviceKind:
    return "cuda" if spec.policy.gpus_per_replica else "cpu"


def _host_bytes(prediction: Budget | None, role: Role) -> int | None:
    """Host memory of one pod of a role; None if nothing is predicted, or the role has no pods of its own."""
    if prediction is None or role == "controller" or role not in prediction.pods():
        return None
    return prediction.peak("host", pod=role)


def worker_request(prediction: Budget | None, spec: RLJobSpec, role: Pod) -> str:
    """Return the memory request of a worker whose template has none: as predicted, or for its processes alone."""
    size_bytes = _host_bytes(prediction, role)
    if size_bytes is None:
        size_bytes = processes_bytes(workload_of(spec), _device(spec), role)
    return byte_quantity(request_bytes(size_bytes))


def predicted_limit_bytes(spec: RLJobSpec, role: Role) -> int | None:
    """Return the memory limit of the role's pods that follows from the prediction.

    None if it is the user's, or a LimitRange's, or if nothing is predicted. `limits: {memory: null}` in the template
    keeps a pod without a limit.
    """
    size_bytes = _host_bytes(predict_memory(spec), role)
    if size_bytes is None:
        return None
    resources = resources_in(getattr(spec, role).template)
    limits, requests = resources.get("limits"), resources.get("requests")
    if isinstance(limits, Mapping) and "memory" in limits:
        return None
    requested = requests.get("memory") if isinstance(requests, Mapping) else None
    try:
        return limit_bytes(size_bytes, quantity_bytes(requested) if requested else 0)
    except ValueError:
        return None  # a quantity that only the API server understands, such as 4e9


def low_memory_limit(spec: RLJobSpec) -> str | None:
    """Return a message about memory limits of the user that are below the prediction; None if there are none."""
    if all(memory_limit_in(template) is None for template in (spec.policy.template, spec.rollout.template)):
        return None
    prediction = predict_memory(spec)
    return None if prediction is None else "; ".join(message for _, message in low_limits(spec, prediction)) or None
