"""A spec that the schema lets pass and that cannot be used: the job waits for a better one, and says why."""

from __future__ import annotations

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.event_reasons import EventReason
from rljob_operator.reconcile.observed import Observed
from rljob_operator.reconcile.status_draft import StatusDraft


def hold(observed: Observed, draft: StatusDraft) -> Desired:
    """For a job that cannot be read at all. Pods that run keep the spec they began with; nothing else is touched."""
    sentence = observed.problem or "the spec cannot be read"
    if draft.status.completion_time is not None:
        return Desired()
    if any(not pod.ended for pod in observed.pods):
        message = f"the attempt that runs keeps the spec it began with; the changed spec cannot be used: {sentence}"
        draft.condition(ConditionType.FAILED, False, ConditionReason.INVALID_SPEC, message)
        return Desired()
    return tell_invalid(sentence, draft)


def tell_invalid(sentence: str, draft: StatusDraft) -> Desired:
    if not draft.held(ConditionType.FAILED):
        draft.event("Warning", EventReason.INVALID_SPEC, sentence)
    draft.condition(
        ConditionType.FAILED, True, ConditionReason.INVALID_SPEC, f"{sentence}; kubectl apply a mended spec"
    )
    return Desired()
