"""Which processes of a role are in which pod: those of the first pod have the lowest ranks."""

from __future__ import annotations

from rljob_api.job import RLJobSpec
from rljob_api.status import Role
from rljob_operator.reconcile.observed import ObservedPod


def first_rank(pod: ObservedPod, spec: RLJobSpec) -> int:
    """Rank of the first process of the pod's own role in it."""
    return pod.index * _processes_of_a_pod(pod.role, spec)


def place_of(role: Role, rank: int, spec: RLJobSpec) -> tuple[Role, int]:
    """Role and index of the pod that process `rank` of `role` is in. Colocated engines live in the policy's pods."""
    role_of_pod: Role = "policy" if role == "rollout" and spec.topology == "Colocated" else role
    return role_of_pod, rank // _processes_of_a_pod(role, spec) if role != "controller" else 0


def gpus_of_a_pod(role: Role, spec: RLJobSpec) -> int:
    """GPUs of the pod that processes of the role are in."""
    if role == "controller":
        return 0
    if role == "policy" or spec.topology == "Colocated":
        return spec.policy.gpus_per_replica
    return 1 if spec.rollout.gpus_per_replica is None else spec.rollout.gpus_per_replica


def _processes_of_a_pod(role: Role, spec: RLJobSpec) -> int:
    """A rank of the policy on every GPU, an engine on every `tensorParallelSize`; without GPUs one of each."""
    gpus_of_a_process = spec.rollout.tensor_parallel_size if role == "rollout" else 1
    return max(gpus_of_a_pod(role, spec) // gpus_of_a_process, 1)
