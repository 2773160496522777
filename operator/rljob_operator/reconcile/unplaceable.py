"""Why pods find no node, in words that name what is missing where."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_operator.reconcile.pod_ranks import gpus_of_a_pod
from rljob_operator.reconcile.view import JobView


def unplaceable(view: JobView) -> str | None:
    """Why pods find no node: the GPUs that the cluster lacks where that is it, else what the scheduler says."""
    waiting = [pod for pod in view.pods if pod.unschedulable and not pod.node]
    if not waiting:
        return None
    if any(pod.role != "controller" for pod in waiting) and (lacking := _lacking_gpus(view)):
        return lacking
    pod = waiting[0]
    others = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
    excluded = view.status.plan.excluded_nodes if view.status.plan else []
    kept_off = f"; the memory plan keeps workers off {', '.join(excluded)}: give them another node" if excluded else ""
    return f"pod {pod.name}{others}: {pod.unschedulable}{kept_off}"


def _lacking_gpus(view: JobView) -> str | None:
    resource = view.settings.gpu_resources[0]
    nodes = [node for node in view.observed.nodes if node.usable]
    if not nodes:
        return None
    largest = max(nodes, key=lambda node: node.gpus)
    requests = _gpu_requests(view)
    for request in requests:
        if request.gpus > largest.gpus:
            has = f"the largest, {largest.name}, has {largest.gpus}" if largest.gpus else "none has any"
            return f"no node has {request.gpus} {resource}: {has}; lower {request.field}, or add a node"
    wanted, total = sum(request.pods * request.gpus for request in requests), sum(node.gpus for node in nodes)
    if wanted > total:
        return f"the job asks for {wanted} {resource}, all usable nodes together have {total}: add nodes"
    return None


@dataclass(frozen=True, slots=True)
class _GpuRequest:
    field: str
    pods: int
    gpus: int
    """GPUs of one pod."""


def _gpu_requests(view: JobView) -> list[_GpuRequest]:
    spec = view.spec
    requests = [_GpuRequest("policy.gpusPerReplica", spec.policy.replicas, gpus_of_a_pod("policy", spec))]
    if view.own_trainer and spec.topology == "Disaggregated":
        rollout_gpus = gpus_of_a_pod("rollout", spec)
        requests.append(_GpuRequest("rollout.gpusPerReplica", spec.rollout.replicas or 1, rollout_gpus))
    return requests
