"""Topologies, and rules about the settings that each of them allows."""

from __future__ import annotations

from typing import Any, Literal

from rljob_api.api_model import Rule

Topology = Literal["Colocated", "Disaggregated"]


def _rollout_gpus(spec: Any) -> int:
    """GPUs of the pod that runs an engine."""
    if spec.topology == "Colocated":
        return int(spec.policy.gpus_per_replica)
    return 1 if spec.rollout.gpus_per_replica is None else int(spec.rollout.gpus_per_replica)


_ROLLOUT_GPUS_CEL = (
    "(self.topology == 'Colocated' ? self.policy.gpusPerReplica"
    " : has(self.rollout.gpusPerReplica) ? self.rollout.gpusPerReplica : 1)"
)

_ONLY_DISAGGREGATED = (
    "requires topology: Disaggregated; with Colocated, every GPU of the policy has one engine: "
    "remove it, or write topology: Disaggregated"
)

TOPOLOGY_RULES = (
    Rule(
        cel="self.topology == 'Disaggregated' || !has(self.rollout.replicas)",
        holds=lambda spec: spec.topology == "Disaggregated" or spec.rollout.replicas is None,
        field="rollout.replicas",
        message=_ONLY_DISAGGREGATED,
    ),
    Rule(
        cel="self.topology == 'Disaggregated' || !has(self.rollout.gpusPerReplica)",
        holds=lambda spec: spec.topology == "Disaggregated" or spec.rollout.gpus_per_replica is None,
        field="rollout.gpusPerReplica",
        message=_ONLY_DISAGGREGATED,
    ),
    Rule(
        cel="self.topology == 'Disaggregated' || !has(self.rollout.template)",
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
        cel=f"(self.policy.gpusPerReplica == 0) == ({_ROLLOUT_GPUS_CEL} == 0)",
        holds=lambda spec: (spec.policy.gpus_per_replica == 0) == (_rollout_gpus(spec) == 0),
        field="rollout.gpusPerReplica",
        message="policy and rollout must both have GPUs or both have none: "
        "write 0 for gpusPerReplica of both, or at least 1",
    ),
    Rule(
        cel=f"self.rollout.tensorParallelSize == 1 || ({_ROLLOUT_GPUS_CEL} > 0"
        f" && {_ROLLOUT_GPUS_CEL} % self.rollout.tensorParallelSize == 0)",
        holds=lambda spec: (
            spec.rollout.tensor_parallel_size == 1
            or (_rollout_gpus(spec) > 0 and _rollout_gpus(spec) % spec.rollout.tensor_parallel_size == 0)
        ),
        field="rollout.tensorParallelSize",
        message="must divide the number of GPUs of the engine's pod, which is policy.gpusPerReplica (Colocated) or "
        "rollout.gpusPerReplica (Disaggregated)",
    ),
)
