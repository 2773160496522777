"""The kinds of jobs in a soak: where policy and engines run, and the failures that can happen there. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rljob_api.fault_injection import FaultClass, FaultPhase
from rljob_api.plan_change import Role
from rljob_api.topology import Topology

Failures = tuple[tuple[FaultClass, tuple[FaultPhase, ...]], ...]
"""Failure classes, each with the phases to draw from."""

_IN_EVERY_TOPOLOGY: Failures = (
    ("ActivationSpike", ("update",)),
    ("Fragmentation", ("update",)),
    ("WeightSyncSpike", ("sync",)),
    ("OptimizerState", ("optimizer",)),
    ("HostMemory", ("update", "rollout")),
    ("WorkerLost", ("load", "rollout", "update", "optimizer", "sync", "checkpoint")),
)

_COLOCATED: Failures = (
    *_IN_EVERY_TOPOLOGY,
    ("AllocatorCache", ("update", "sync")),
    ("KVCacheOversized", ("load", "rollout")),
    ("SharedMemory", ("sync", "rollout")),
)

# Each process has a GPU of its own, so torch's cache is in the way of no other. The engine keeps its KV cache while it
# receives the weights, which do not pass through /dev/shm.
_DISAGGREGATED: Failures = (
    *_IN_EVERY_TOPOLOGY,
    ("KVCacheOversized", ("load", "rollout", "sync")),
    ("SharedMemory", ("update", "rollout")),
)


@dataclass(frozen=True, slots=True)
class JobKind:
    """Jobs with the same roles in the same pods."""

    topology: Topology

    failures: Failures
    """Failures to draw from."""

    gpus: tuple[int, ...]
    """GPUs of a worker pod to draw from. The nodes have eight for all jobs, but few cores."""

    policy_pods: int = 1

    rollout_pods: int = 0
    """0 if the engines are in the pods of the policy."""

    max_staleness: Literal[0, 1] = 0

    tensor_parallel_size: int = 1

    partial_rollout_prompts: int = 0

    def processes(self, gpus: int) -> dict[Role, int]:
        """Processes of each role, if each worker pod has `gpus`."""
        # Without GPUs, a pod of the rollout has one engine, whatever its size.
        of_engine_pod = max(gpus, self.tensor_parallel_size if self.rollout_pods else 1)
        return {
            "policy": self.policy_pods * max(gpus, 1),
            "rollout": (self.rollout_pods or self.policy_pods) * of_engine_pod,
        }


KINDS = (
    JobKind("Colocated", _COLOCATED, gpus=(0, 0, 1, 1, 2)),
    JobKind("Colocated", _COLOCATED, gpus=(0, 1), policy_pods=2),
    JobKind("Disaggregated", _DISAGGREGATED, gpus=(0, 1), rollout_pods=1),
    JobKind("Disaggregated", _DISAGGREGATED, gpus=(0, 1), rollout_pods=2, max_staleness=1),
    JobKind("Colocated", _COLOCATED, gpus=(2,), tensor_parallel_size=2),
    JobKind("Disaggregated", _DISAGGREGATED, gpus=(0, 2), policy_pods=2, rollout_pods=1, tensor_parallel_size=2),
    JobKind("Disaggregated", _DISAGGREGATED, gpus=(0,), rollout_pods=2, max_staleness=1, partial_rollout_prompts=2),
)
