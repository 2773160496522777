"""Summaries of the other conditions: the phase, and Ready and Stalled as in kstatus, which Flux and other tools read.

https://github.com/kubernetes-sigs/cli-utils/blob/master/pkg/kstatus/README.md
"""

from __future__ import annotations

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_operator.reconcile.status_draft import StatusDraft, clipped

_LONGEST_MESSAGE = 512

_FINAL = {
    ConditionType.COMPLETE: ConditionReason.COMPLETE,
    ConditionType.FAILED: ConditionReason.FAILED,
}
_PASSING = {
    ConditionType.SUSPENDED: ConditionReason.SUSPENDED,
    ConditionType.RECOVERING: ConditionReason.RECOVERING,
    ConditionType.RUNNING: ConditionReason.RUNNING,
}
"""The phase is that of the first condition that holds."""

_NEEDS_A_PERSON = (
    ConditionReason.FOREIGN_OBJECT,
    ConditionReason.FOREIGN_POD,
    ConditionReason.POD_NOT_TERMINATING,
)
"""Reasons of Scheduled for which no pods are created until a person removes something."""


def summarize(draft: StatusDraft) -> None:
    """Set the conditions Ready and Stalled from the others. The reason of Ready is the phase."""
    if stalled := _why_stalled(draft):
        draft.condition(ConditionType.STALLED, True, stalled[0], clipped(stalled[1], _LONGEST_MESSAGE))
    else:
        draft.reset(ConditionType.STALLED)
    phase, message = _phase(draft)
    works = draft.holds(ConditionType.COMPLETE) or draft.holds(ConditionType.RUNNING)
    draft.condition(ConditionType.READY, works, phase, clipped(message, _LONGEST_MESSAGE))


def _why_stalled(draft: StatusDraft) -> tuple[str, str] | None:
    """Reason and message if nothing continues before a person acts."""
    if draft.holds(ConditionType.FAILED):
        return draft.reason(ConditionType.FAILED), draft.message(ConditionType.FAILED)
    if draft.invalid_spec is not None:
        return ConditionReason.INVALID_SPEC, draft.invalid_spec
    if draft.reason(ConditionType.SCHEDULED) in _NEEDS_A_PERSON:
        return draft.reason(ConditionType.SCHEDULED), draft.message(ConditionType.SCHEDULED)
    return None


def _phase(draft: StatusDraft) -> tuple[ConditionReason, str]:
    """The phase, and the message of the condition that it comes from."""
    invalid = draft.invalid_spec if not draft.holds(ConditionType.RUNNING) else None
    for type_, phase in (_FINAL if invalid else _FINAL | _PASSING).items():
        if draft.holds(type_):
            return phase, draft.message(type_)
    if invalid:
        return ConditionReason.INVALID, invalid
    waits = ConditionType.RUNNING if draft.holds(ConditionType.SCHEDULED) else ConditionType.SCHEDULED
    return ConditionReason.PENDING, draft.message(waits)
