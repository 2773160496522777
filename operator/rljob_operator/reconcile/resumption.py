"""A failed job resumes after a change of its spec, with fresh budgets.

The failure has to be answered by a person, and every message about one names what to change: a setting of the memory, a
limit of the recovery, a template, the deadline. Instead of a list of answers for each failure, every change of the spec
counts, but for fields that cannot affect an attempt. A failure whose cause was outside the spec is answered by
`spec.retry`.
"""

from __future__ import annotations

import hashlib
import json

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.job import RLJobSpec
from rljob_api.status import FailureStatus
from rljob_operator.reconcile.status_draft import EventReason, StatusDraft
from rljob_operator.reconcile.view import JobView

HOW_TO_RESUME = "The job resumes after a change of its spec; raise spec.retry if nothing else has to change."

_WITHOUT_EFFECT = {"suspend", "ttl_seconds_after_finished"}
"""Fields that stop or delete a job: nobody changes them to resume one."""


def failed_spec(view: JobView) -> FailureStatus:
    """The present spec, as that of a failure."""
    return FailureStatus(generation=view.observed.generation, spec_digest=_digest(view.job.spec))


def is_answered(view: JobView) -> bool:
    """The job has failed, and its spec has changed since."""
    failure = view.status.failure
    if failure is None or not view.holds(ConditionType.FAILED):
        return False
    # The generation too: the defaults of another version of the operator are no change by a person.
    return view.observed.generation > failure.generation and _digest(view.job.spec) != failure.spec_digest


def resumption_message(view: JobView, draft: StatusDraft) -> str:
    """`the job resumes at step 4`. After the last step, only what follows it is missing, such as the model."""
    step, steps = draft.status.step or 0, view.spec.algorithm.steps
    return f"the job resumes at step {step + 1}" if step < steps else f"the job resumes after step {step}, its last one"


def resume(view: JobView, draft: StatusDraft) -> None:
    """Clear the failure. The record of attempts stays; budgets and delays start afresh."""
    sentence = (
        f"the spec was changed after the failure (generation {view.observed.generation}): "
        f"{resumption_message(view, draft)}"
    )
    latest = draft.attempt
    if latest is not None and latest.end_time is None:
        draft.change_attempt(end_time=view.now)
    draft.condition(ConditionType.FAILED, False, ConditionReason.RESUMED, sentence)
    draft.reset(ConditionType.RECOVERING)
    draft.set(
        completion_time=None,
        failure=None,
        adjustments=0,
        restarts=0,
        resumed_from_attempt=latest.number + 1 if latest else 1,
    )
    draft.event("Normal", EventReason.RESUMED, sentence)


def _digest(spec: RLJobSpec) -> str:
    fields = spec.model_dump(mode="json", by_alias=True, exclude=_WITHOUT_EFFECT, exclude_defaults=True)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
