"""Creation of the objects and pods that an attempt lacks; specs that cannot be turned into pods."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_operator.objects.invalid_template import InvalidTemplate
from rljob_operator.objects.job_objects import JobObjects, build_job_objects
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.gang import gang_of
from rljob_operator.reconcile.observed import Observed, ObservedNode
from rljob_operator.reconcile.placement import controller_placement
from rljob_operator.reconcile.status_draft import EventReason, StatusDraft
from rljob_operator.reconcile.view import JobView


def create_missing(objects: JobObjects, view: JobView) -> Desired:
    """Create supporting objects first: a pod that starts before its Secret exists waits for the next kubelet retry."""
    missing = set(view.missing)
    pods = tuple(pod for pod in objects.pods if pod["metadata"]["name"] in missing)
    return Desired(require=objects.require, apply=objects.apply, create=objects.create + pods, events=objects.notices)


def build(view: JobView, attempt: int) -> JobObjects | str:
    """The objects of an attempt, or the error in the templates of the job."""
    observed = view.observed
    try:
        return build_job_objects(
            view.job.model_copy(update={"status": None}),
            view.settings,
            namespace=observed.namespace,
            uid=observed.uid,
            attempt=attempt,
            plan=view.status.plan,
            plan_changes=view.status.plan_changes,
            restarts_in_place=_can_restart_in_place(observed.nodes),
            controller_placement=controller_placement(observed, view.spec, nodes_are_known=view.settings.watch_nodes),
            gang=gang_of(view),
            ray_token=observed.fresh_token,
        )
    except InvalidTemplate as problem:
        return problem.sentence


def _can_restart_in_place(nodes: Sequence[ObservedNode]) -> bool:
    """Pods with a restart rule are scheduled only on nodes that support it, so all nodes have to."""
    usable = [node for node in nodes if node.usable]
    return bool(usable) and all(node.restarts_in_place for node in usable)


def harmless_foreign_pods(view: JobView) -> list[str]:
    """Foreign pods that have the job's labels, but no name that the job needs."""
    return sorted(set(view.observed.foreign_pods) - {name for name, _ in view.expected_pods})


def report_invalid_spec(observed: Observed, draft: StatusDraft) -> Desired:
    """Report a job that cannot be parsed. Running pods keep the spec that they started with."""
    sentence = observed.problem or "cannot parse the spec"
    if draft.status.completion_time is not None:
        return Desired()
    if any(not pod.ended for pod in observed.pods):
        message = f"the running attempt keeps its spec; the changed spec is invalid: {sentence}"
        draft.invalid_spec = message
        return Desired()
    if draft.holds(ConditionType.RUNNING):
        draft.condition(ConditionType.RUNNING, False, ConditionReason.PODS_TERMINATED, "the pods have terminated")
    return set_invalid_spec(sentence, draft)


def set_invalid_spec(sentence: str, draft: StatusDraft) -> Desired:
    """Record that no attempt can use the spec. This is no failure of the job, which continues with a corrected spec."""
    if draft.reason(ConditionType.STALLED) != ConditionReason.INVALID_SPEC:
        draft.event("Warning", EventReason.INVALID_SPEC, sentence)
    if draft.holds(ConditionType.FAILED):  # as earlier versions of the operator reported an invalid spec
        draft.reset(ConditionType.FAILED)
    draft.invalid_spec = f"{sentence}; fix the spec with kubectl apply"
    return Desired()
