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
    """Support objects first: a pod that starts before its Secret is there waits for the kubelet's next try."""
    missing = set(view.missing)
    pods = tuple(pod for pod in objects.pods if pod["metadata"]["name"] in missing)
    return Desired(apply=objects.apply, create=objects.create + pods, events=objects.notices)


def build(view: JobView, attempt: int) -> JobObjects | str:
    """The objects of an attempt, or what is wrong with the templates of the job."""
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
            restarts_in_place=_restart_in_place(observed.nodes),
            controller_placement=controller_placement(observed, view.spec),
            gang=gang_of(observed, view.spec),
            ray_token=observed.fresh_token,
        )
    except InvalidTemplate as problem:
        return problem.sentence


def _restart_in_place(nodes: Sequence[ObservedNode]) -> bool:
    """Pods that ask for it find a place on nodes only that know it, so all of them have to."""
    usable = [node for node in nodes if node.usable]
    return bool(usable) and all(node.restarts_in_place for node in usable)


def harmless_foreign_pods(view: JobView) -> list[str]:
    """Names of pods that have the job's labels, are not its own, and are in nobody's way."""
    return sorted(set(view.observed.foreign_pods) - {name for name, _ in view.expected_pods})


def report_invalid_spec(observed: Observed, draft: StatusDraft) -> Desired:
    """For a job that cannot be read at all. Pods that run keep the spec they began with; nothing else is touched."""
    sentence = observed.problem or "the spec cannot be read"
    if draft.status.completion_time is not None:
        return Desired()
    if any(not pod.ended for pod in observed.pods):
        message = f"the attempt that runs keeps the spec it began with; the changed spec cannot be used: {sentence}"
        draft.condition(ConditionType.FAILED, False, ConditionReason.INVALID_SPEC, message)
        return Desired()
    return set_invalid_spec(sentence, draft)


def set_invalid_spec(sentence: str, draft: StatusDraft) -> Desired:
    if not draft.held(ConditionType.FAILED):
        draft.event("Warning", EventReason.INVALID_SPEC, sentence)
    draft.condition(
        ConditionType.FAILED, True, ConditionReason.INVALID_SPEC, f"{sentence}; kubectl apply a mended spec"
    )
    return Desired()
