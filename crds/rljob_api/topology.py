"""Topologies: the pods of each, and the settings that each allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rljob_api.api_model import Rule

Topology = Literal["Colocated", "Disaggregated"]


@dataclass(frozen=True, slots=True)
class WorkerPods:
    """The worker pods of one role. Each process has one GPU."""

    role: Literal["policy", "rollout"]

    replicas: int

    gpus: int
    """GPUs of each pod."""

    processes_without_gpus: int = 1
    """Processes of a pod without GPUs."""

    @property
    def processes_per_pod(self) -> int:
        """Policy ranks, or processes of engines. With topology Colocated, the same pods run as many of each."""
        return self.gpus or self.processes_without_gpus

    @property
    def processes(self) -> int:
        return self.replicas * self.processes_per_pod


def worker_pods(spec: Any) -> tuple[WorkerPods, ...]:
    """The worker pods of an `RLJobSpec` for RLJob's own trainer, those of the policy first."""
    policy = WorkerPods("policy", spec.policy.replicas, spec.policy.gpus_per_replica)
    if spec.topology == "Colocated":
        return (policy,)
    rollout = spec.rollout
    return policy, WorkerPods("rollout", rollout.replicas or 1, _rollout_gpus(spec), rollout.given_tensor_parallel_size)


def pod_of_process(spec: Any, role: str, rank: int) -> tuple[str, int]:
    """Role and index of the pod that runs a process. With topology Colocated, engines run in the policy's pods."""
    if role == "controller":
        return role, 0
    policy, *others = worker_pods(spec)
    pods = others[0] if others and role == others[0].role else policy
    return pods.role, rank // pods.processes_per_pod


def _rollout_gpus(spec: Any) -> int:
    """GPUs of the pod that runs an engine."""
    if spec.topology == "Colocated":
        return int(spec.policy.gpus_per_replica)
    return 1 if spec.rollout.gpus_per_replica is None else int(spec.rollout.gpus_per_replica)


def _engines_fill_their_pods(spec: Any) -> bool:
    """True if each pod of the engines has a whole number of engines of `tensorParallelSize` processes.

    Without GPUs, a rollout pod of RLJob's own trainer is one engine, and a colocated pod has one process of each role.
    """
    size, gpus = spec.rollout.given_tensor_parallel_size, _rollout_gpus(spec)
    if size == 1:
        return True
    if gpus:
        return bool(gpus % size == 0)
    return spec.trainer is None and spec.topology == "Disaggregated"


_ROLLOUT_GPUS_CEL = (
    "(self.topology == 'Colocated' ? self.policy.gpusPerReplica"
    " : has(self.rollout.gpusPerReplica) ? self.rollout.gpusPerReplica : 1)"
)

_ONLY_DISAGGREGATED = (
    "requires topology: Disaggregated; with Colocated, the engines use the GPUs of the policy: "
    "remove it, or write topology: Disaggregated"
)

TOPOLOGY_RULES = (
    Rule(
        cel="!has(self.rollout.replicas) || self.topology == 'Disaggregated'",
        holds=lambda spec: spec.topology == "Disaggregated" or spec.rollout.replicas is None,
        field="rollout.replicas",
        message=_ONLY_DISAGGREGATED,
    ),
    Rule(
        cel="!has(self.rollout.gpusPerReplica) || self.topology == 'Disaggregated'",
        holds=lambda spec: spec.topology == "Disaggregated" or spec.rollout.gpus_per_replica is None,
        field="rollout.gpusPerReplica",
        message=_ONLY_DISAGGREGATED,
    ),
    Rule(
        cel="!has(self.rollout.template) || self.topology == 'Disaggregated'",
        holds=lambda spec: spec.topology == "Disaggregated" or spec.rollout.template is None,
        field="rollout.template",
        message="requires topology: Disaggregated; with Colocated, policy and rollout share pods: "
        "write policy.template instead",
    ),
    Rule(
        cel="self.topology == 'Colocated' || self.memory.rolloutSleep in ['Auto', 'Disabled']",
        holds=lambda spec: spec.topology == "Colocated" or spec.memory.rollout_sleep in ("Auto", "Disabled"),
        field="memory.rolloutSleep",
        message="requires topology: Colocated; with Disaggregated, the engine has its own GPU: write Auto",
    ),
    Rule(
        cel="self.topology == 'Colocated' || (self.policy.gpusPerReplica == 0) == "
        "(has(self.rollout.gpusPerReplica) && self.rollout.gpusPerReplica == 0)",
        holds=lambda spec: (spec.policy.gpus_per_replica == 0) == (_rollout_gpus(spec) == 0),
        field="rollout.gpusPerReplica",
        message="policy and rollout must both have GPUs or both have none: "
        "write 0 for gpusPerReplica of both, or at least 1",
    ),
    Rule(
        cel="self.algorithm.maxStaleness == 0 || self.topology == 'Disaggregated'",
        holds=lambda spec: spec.topology == "Disaggregated" or spec.algorithm.max_staleness == 0,
        field="algorithm.maxStaleness",
        message="requires topology: Disaggregated; with Colocated, policy and engine take turns on a GPU: write 0",
    ),
    Rule(
        cel="!has(self.rollout.tensorParallelSize) || type(self.rollout.tensorParallelSize) == string"
        f" || self.rollout.tensorParallelSize == 1 || ({_ROLLOUT_GPUS_CEL} > 0"
        f" ? {_ROLLOUT_GPUS_CEL} % self.rollout.tensorParallelSize == 0"
        " : !has(self.trainer) && self.topology == 'Disaggregated')",
        holds=_engines_fill_their_pods,
        field="rollout.tensorParallelSize",
        message="must divide the GPUs of the engine's pod, since an engine does not span pods: write Auto, or a "
        "divisor of policy.gpusPerReplica (Colocated) or rollout.gpusPerReplica (Disaggregated); if that is 0, write "
        "Auto, or use RLJob's own trainer with topology: Disaggregated",
    ),
)
