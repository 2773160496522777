"""What must be there before pods are made, and which nodes the controller may take."""

from __future__ import annotations

from rljob_api.conditions import ConditionReason
from rljob_api.job import RLJobSpec
from rljob_operator.objects.attempt import ControllerPlacement
from rljob_operator.reconcile.observed import Observed, ObservedNode
from rljob_operator.reconcile.view import JobView

Obstacle = tuple[ConditionReason, str]
"""Why no pods are made yet: reason and sentence of the condition Scheduled."""


def obstacle_to_pods(view: JobView) -> Obstacle | None:
    """What must change in the cluster before pods are made; None where nothing stands in the way."""
    observed, spec = view.observed, view.spec
    if observed.namespace_terminating:
        return (
            ConditionReason.NAMESPACE_TERMINATING,
            f"namespace {observed.namespace} is being deleted: no pods are made",
        )
    if spec.queue_name is not None and not observed.kueue_installed:
        return (
            ConditionReason.GANG_SCHEDULER_MISSING,
            f"spec.queueName is {spec.queue_name}, but the cluster has no Kueue: install it, or remove queueName",
        )
    if spec.gang == "Volcano" and not observed.volcano_installed:
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


def controller_placement(observed: Observed, spec: RLJobSpec) -> ControllerPlacement:
    """Nodes without GPUs where there are any, or where the job insists: then the scheduler does the waiting."""
    if spec.controller.require_gpu_free_node or any(_takes_controller(node, spec) for node in observed.nodes):
        return "GpuFreeNodes"
    return "AnyNode"


def _takes_controller(node: ObservedNode, spec: RLJobSpec) -> bool:
    tolerates = bool(spec.controller.template.spec.get("tolerations"))
    return node.gpus == 0 and node.usable and (tolerates or not node.tainted)
