"""Placement: obstacles to pods, nodes for the controller, pods that find no node, and gang scheduling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_api.job import RLJobSpec
from rljob_api.roles import PodTemplate
from rljob_operator.objects.attempt import ControllerPlacement, Gang
from rljob_operator.objects.placement import QUEUE_LABEL, queue_of
from rljob_operator.objects.pod_layout import PodLayout
from rljob_operator.reconcile.desired import AttemptResult
from rljob_operator.reconcile.observed import ObservedJob, ObservedNode
from rljob_operator.reconcile.view import JobView, and_more, elapsed_seconds

Obstacle = tuple[ConditionReason, str]
"""Reason and message of the condition Scheduled while no pods are created."""


def obstacle_to_pods(view: JobView) -> Obstacle | None:
    """Return the change of the cluster that is needed before pods can be created; None if there is none."""
    observed, spec, queue = view.observed, view.spec, queue_of(view.job)
    if observed.namespace_terminating:
        message = f"namespace {observed.namespace} is being deleted: no pods are created"
        return ConditionReason.NAMESPACE_TERMINATING, message
    if queue is not None and not observed.kueue_installed:
        field = "spec.queueName" if spec.queue_name else f"the label {QUEUE_LABEL}"
        message = f"{field} is {queue}, but the cluster has no Kueue: install it, or remove {field}"
        return ConditionReason.GANG_SCHEDULER_MISSING, message
    if queue is None and spec.gang == "Volcano" and not observed.volcano_installed:
        message = "spec.gang is Volcano, but the cluster has no Volcano: install it, or write gang: Auto"
        return ConditionReason.GANG_SCHEDULER_MISSING, message
    requires_node = spec.controller.require_gpu_free_node and view.own_trainer
    if requires_node and observed.nodes and not any(_takes_controller(node, spec) for node in observed.nodes):
        return (
            ConditionReason.NO_GPU_FREE_NODE,
            f"none of the {len(observed.nodes)} nodes is ready, open to pods and without GPUs: "
            "add one, or write controller.requireGpuFreeNode: false",
        )
    return None


def controller_placement(observed: ObservedJob, spec: RLJobSpec, *, nodes_are_known: bool) -> ControllerPlacement:
    """Return nodes without GPUs if there are any, or if the job requires one: then the pod waits in the scheduler.

    Otherwise tainted nodes with GPUs if there are any: a cluster that begins without nodes gets one that fits.
    """
    if spec.controller.require_gpu_free_node or any(_takes_controller(node, spec) for node in observed.nodes):
        return "GpuFreeNodes"
    if nodes_are_known and not any(node.gpus and node.usable and node.tainted for node in observed.nodes):
        return "UntaintedNodes"
    return "AnyNode"


def allowed_nodes(nodes: Iterable[ObservedNode], template: PodTemplate | None, gpus_per_pod: int) -> list[ObservedNode]:
    """Return the nodes with enough GPUs and the labels of the template's `nodeSelector`.

    Taints, affinities and free resources do not count.
    """
    selector = (template.spec if template else {}).get("nodeSelector")
    wanted = {f"{name}={value}" for name, value in selector.items()} if isinstance(selector, Mapping) else set()
    return [node for node in nodes if node.gpus >= gpus_per_pod and wanted.issubset(node.labels)]


def _takes_controller(node: ObservedNode, spec: RLJobSpec) -> bool:
    tolerates = bool(spec.controller.template.spec.get("tolerations"))
    return node.gpus == 0 and node.usable and (tolerates or not node.tainted)


def refusal(view: JobView) -> Obstacle | None:
    """Return the reason why missing pods cannot be created, and what to do about it; None if they can."""
    observed = view.observed
    if observed.namespace_terminating:
        return obstacle_to_pods(view)
    if foreign := sorted(set(view.missing) & set(observed.foreign_pods)):
        message = f"a foreign pod has the name {foreign[0]}, which the job needs: delete that pod, or rename the job"
        return ConditionReason.FOREIGN_POD, message
    refused = observed.refused and f"the API server refused: {observed.refused}{growth_note(view)}"
    obstacles = (
        (ConditionReason.FOREIGN_OBJECT, observed.foreign_object),
        (ConditionReason.MISSING_OBJECT, observed.missing_object),
        (ConditionReason.PODS_REFUSED, refused),
    )
    return next(((reason, message) for reason, message in obstacles if message), None)


def unplaceable(view: JobView) -> str | None:
    """Return the reason why pods find no node: missing GPUs, else the scheduler's message."""
    waiting = [pod for pod in view.pods if pod.unschedulable and not pod.node]
    if not waiting:
        return None
    if any(pod.role != "controller" for pod in waiting) and (lacking := _lacking_gpus(view)):
        return f"{lacking}{growth_note(view)}"
    pod = waiting[0]
    nodes = view.status.plan.excluded_nodes if view.status.plan else []
    excluded = f"; the memory plan excludes {', '.join(nodes)}: add another node" if nodes else ""
    return f"pod {pod.name}{and_more(waiting)}: {pod.unschedulable}{excluded}{growth_note(view)}"


def growth_note(view: JobView) -> str:
    """Return the reason why a job that waits asks for more GPUs than its manifest; empty if it does not."""
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
            found = f"the largest, {largest.name}, has {largest.gpus}" if largest.gpus else "none has any"
            return (
                f"no node has {group.gpus} {resource}: {found}; add a node, or delete the job and create it again "
                f"with a lower {group.role}.gpusPerReplica"
            )
    wanted, total = sum(view.layout.worker_gpus), sum(node.gpus for node in nodes)
    if wanted > total:
        return f"the job requests {wanted} {resource}, but all usable nodes together have {total}: add nodes"
    return None


def can_avoid(node: str, view: JobView) -> bool:
    """Return True if the other nodes have enough GPUs for all workers, free or not: then `node` can be excluded.

    Workers with GPUs tolerate the usual taint of GPU nodes; other workers tolerate no taint.
    """
    excluded = {node, *(view.status.plan.excluded_nodes if view.status.plan else ())}
    others = [other for other in view.observed.nodes if other.usable and other.name not in excluded]
    wanted = view.layout.worker_gpus
    if not any(wanted):
        return any(not other.tainted for other in others)
    return _fit((other.gpus for other in others), wanted)


def _fit(nodes: Iterable[int], pods: Iterable[int]) -> bool:
    """Pods with these GPUs fit on nodes with these GPUs, by best fit, largest pod first."""
    free = list(nodes)
    for wanted in sorted(pods, reverse=True):
        best = min((gpus for gpus in free if gpus >= wanted), default=None)
        if best is None:
            return False
        free[free.index(best)] -= wanted
    return True


# --- Gang scheduling ---


def gang_of(view: JobView) -> Gang:
    if queue_of(view.job) is not None:
        return "Kueue"
    if view.spec.gang == "Volcano" or (view.spec.gang == "Auto" and view.observed.volcano_installed):
        return "Volcano"
    return "Native"


def half_placed_seconds_left(view: JobView) -> float | None:
    """Return the seconds until the pods of a job that is scheduled, or refused, in part are deleted; None if it is
    neither.

    Counted from the last pod that was scheduled, or created. Not without a gang. Pods that were created for Kueue or
    Volcano, even if the spec has changed since, are left to it once all of them exist.
    """
    if view.spec.gang == "Disabled" or not view.pods:
        return None
    if view.attempt is not None and view.attempt.replacing_pods:
        return None  # the others continue to work
    if not _is_refused_in_part(view):
        placed = sum(1 for pod in view.pods if pod.node)
        if view.missing or placed in (0, len(view.expected_pods)) or any(pod.in_group for pod in view.pods):
            return None
    since = max(pod.placed_at if pod.node else pod.created_at for pod in view.pods)
    return max(0.0, view.settings.placement_timeout_seconds - elapsed_seconds(since, view.now))


def half_placed_too_long(view: JobView) -> AttemptResult | None:
    if half_placed_seconds_left(view) != 0.0:
        return None
    expected, refused = len(view.expected_pods), refusal(view)
    if view.missing and refused is not None:
        message = f"only {len(view.pods)} of {expected} pods exist, so all are deleted: {refused[1]}"
    else:
        placed = sum(1 for pod in view.pods if pod.node)
        scheduled = view.condition(ConditionType.SCHEDULED)
        cause = f": {scheduled.message}" if scheduled and scheduled.reason == ConditionReason.UNSCHEDULABLE else ""
        message = f"only {placed} of {expected} pods were scheduled, so all are deleted{cause}"
    return AttemptResult(AttemptReason.PLACEMENT_TIMED_OUT, message)


def _is_refused_in_part(view: JobView) -> bool:
    """Pods that exist count against a quota, for example, in which another job waits for room.

    Without a refusal, missing pods are about to be created, by an operator that was away for long.
    """
    return bool(view.missing) and refusal(view) is not None
