"""Placement: obstacles to pods, nodes for the controller, nodes that workers can avoid, pods that find no node."""

from __future__ import annotations

from collections.abc import Iterable

from rljob_api.conditions import ConditionReason
from rljob_api.job import RLJobSpec
from rljob_operator.objects.attempt import ControllerPlacement
from rljob_operator.objects.gang_scheduling import QUEUE_LABEL, queue_of
from rljob_operator.objects.pod_layout import PodLayout
from rljob_operator.reconcile.observed import Observed, ObservedNode
from rljob_operator.reconcile.view import JobView

Obstacle = tuple[ConditionReason, str]
"""Reason and message of the condition Scheduled while no pods are created."""


def obstacle_to_pods(view: JobView) -> Obstacle | None:
    """Change of the cluster that is needed before pods can be created; None if there is none."""
    observed, spec = view.observed, view.spec
    if observed.namespace_terminating:
        return (
            ConditionReason.NAMESPACE_TERMINATING,
            f"namespace {observed.namespace} is being deleted: no pods are created",
        )
    if (queue := queue_of(view.job)) is not None and not observed.kueue_installed:
        field = "spec.queueName" if spec.queue_name else f"the label {QUEUE_LABEL}"
        return (
            ConditionReason.GANG_SCHEDULER_MISSING,
            f"{field} is {queue}, but the cluster has no Kueue: install it, or remove {field}",
        )
    if queue is None and spec.gang == "Volcano" and not observed.volcano_installed:
        return (
            ConditionReason.GANG_SCHEDULER_MISSING,
            "spec.gang is Volcano, but the cluster has no Volcano: install it, or write gang: Auto",
        )
    insists = spec.controller.require_gpu_free_node and view.own_trainer
    if insists and observed.nodes and not any(_takes_controller(node, spec) for node in observed.nodes):
        return (
            ConditionReason.NO_GPU_FREE_NODE,
            f"none of the {len(observed.nodes)} nodes is ready, open to pods and without GPUs: "
            "add one, or write controller.requireGpuFreeNode: false",
        )
    return None


def controller_placement(observed: Observed, spec: RLJobSpec, *, nodes_are_known: bool) -> ControllerPlacement:
    """Nodes without GPUs if there are any, or if the job requires one: then the pod waits in the scheduler.

    Otherwise tainted nodes with GPUs if there are any: a cluster that begins without nodes gets one that fits.
    """
    if spec.controller.require_gpu_free_node or any(_takes_controller(node, spec) for node in observed.nodes):
        return "GpuFreeNodes"
    if nodes_are_known and not any(node.gpus and node.usable and node.tainted for node in observed.nodes):
        return "UntaintedNodes"
    return "AnyNode"


def _takes_controller(node: ObservedNode, spec: RLJobSpec) -> bool:
    tolerates = bool(spec.controller.template.spec.get("tolerations"))
    return node.gpus == 0 and node.usable and (tolerates or not node.tainted)


def refusal(view: JobView) -> Obstacle | None:
    """Reason why missing pods cannot be created, and what to do about it; None if they can."""
    if view.observed.namespace_terminating:
        return obstacle_to_pods(view)
    if foreign := _foreign_in_the_way(view):
        sentence = f"a foreign pod has the name {foreign[0]}, which the job needs: delete that pod, or rename the job"
        return ConditionReason.FOREIGN_POD, sentence
    if view.observed.foreign_object:
        return ConditionReason.FOREIGN_OBJECT, view.observed.foreign_object
    if view.observed.missing_object:
        return ConditionReason.MISSING_OBJECT, view.observed.missing_object
    if view.observed.refused:
        return ConditionReason.PODS_REFUSED, f"the API server refused: {view.observed.refused}{growth_note(view)}"
    return None


def _foreign_in_the_way(view: JobView) -> list[str]:
    """Names that the attempt needs and that foreign pods have."""
    return sorted(set(view.missing) & set(view.observed.foreign_pods))


def unplaceable(view: JobView) -> str | None:
    """Reason why pods find no node: missing GPUs, else the scheduler's message."""
    waiting = [pod for pod in view.pods if pod.unschedulable and not pod.node]
    if not waiting:
        return None
    if any(pod.role != "controller" for pod in waiting) and (lacking := _lacking_gpus(view)):
        return f"{lacking}{growth_note(view)}"
    pod = waiting[0]
    others = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
    excluded = view.status.plan.excluded_nodes if view.status.plan else []
    kept_off = f"; the memory plan excludes {', '.join(excluded)}: add another node" if excluded else ""
    return f"pod {pod.name}{others}: {pod.unschedulable}{kept_off}{growth_note(view)}"


def growth_note(view: JobView) -> str:
    """The reason why a job that waits asks for more GPUs than its manifest; empty if it does not."""
    if view.status.plan is None or view.status.plan.policy_gpus is None:
        return ""
    before = PodLayout.of(view.job.spec).policy_ranks
    return (
        f"; the policy has grown from {before} to {view.layout.policy_ranks} GPUs because it ran out of "
        "memory (recovery.maxGpus): to return to its former size, suspend the job, remove maxGpus and resume it"
    )


def _lacking_gpus(view: JobView) -> str | None:
    resource = view.settings.gpu_resources[0]
    nodes = [node for node in view.observed.nodes if node.usable]
    if not nodes:
        return None
    largest = max(nodes, key=lambda node: node.gpus)
    for group in view.layout.workers:
        if group.gpus > largest.gpus:
            has = f"the largest, {largest.name}, has {largest.gpus}" if largest.gpus else "none has any"
            return (
                f"no node has {group.gpus} {resource}: {has}; add a node, or delete the job and create it again with a "
                f"lower {group.role}.gpusPerReplica"
            )
    wanted, total = sum(view.layout.worker_gpus), sum(node.gpus for node in nodes)
    if wanted > total:
        return f"the job requests {wanted} {resource}, but all usable nodes together have {total}: add nodes"
    return None


def can_avoid(node: str, view: JobView) -> bool:
    """The other nodes have enough GPUs for all workers, free or not: excluding `node` cannot block the job.

    Workers with GPUs tolerate the usual taint of GPU nodes; other workers tolerate no taint.
    """
    left_out = {node, *(view.status.plan.excluded_nodes if view.status.plan else ())}
    others = [other for other in view.observed.nodes if other.usable and other.name not in left_out]
    wanted = view.layout.worker_gpus
    if not any(wanted):
        return any(not other.tainted for other in others)
    return _hold((other.gpus for other in others), wanted)


def _hold(nodes: Iterable[int], pods: Iterable[int]) -> bool:
    """Pods with these GPUs fit on nodes with these GPUs, by best fit, largest pod first."""
    free = sorted(nodes)
    for wanted in sorted(pods, reverse=True):
        fitting = [gpus for gpus in free if gpus >= wanted]
        if not fitting:
            return False
        free.remove(fitting[0])
        free = sorted([*free, fitting[0] - wanted])
    return True
