"""Why pods find no node, in words that name what is missing where."""

from __future__ import annotations

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
    for group in view.layout.workers:
        if group.gpus > largest.gpus:
            has = f"the largest, {largest.name}, has {largest.gpus}" if largest.gpus else "none has any"
            return f"no node has {group.gpus} {resource}: {has}; lower {group.role}.gpusPerReplica, or add a node"
    wanted, total = sum(view.layout.worker_gpus), sum(node.gpus for node in nodes)
    if wanted > total:
        return f"the job asks for {wanted} {resource}, all usable nodes together have {total}: add nodes"
    return None
