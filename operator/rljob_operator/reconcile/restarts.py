"""The delay between two attempts."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.conditions import AttemptReason
from rljob_api.status import AttemptStatus

LONGEST_DELAY_SECONDS = 300.0

REQUESTED = frozenset(
    {
        AttemptReason.SUSPEND_REQUESTED,
        AttemptReason.STEPS_RAISED,
        AttemptReason.PLACEMENT_TIMED_OUT,
        AttemptReason.NOT_RESTARTED_IN_PLACE,
        AttemptReason.ALL_STEPS_COMMITTED,
    }
)
"""Ends that are no failures: nothing has to recover from them."""


def restart_delay_seconds(attempts: Sequence[AttemptStatus], first_delay_seconds: float) -> float:
    """Seconds between the end of the last of `attempts` and the next.

    0 after progress, a change of the memory plan, or an end that was asked for; doubled with each further attempt in a
    row that committed nothing, whatever the cause.
    """
    without_progress = 0
    for attempt in reversed(attempts):
        if attempt.reason in REQUESTED or attempt.remedy is not None or committed_by(attempt) > 0:
            break
        without_progress += 1
    if without_progress == 0:
        return 0.0
    return min(first_delay_seconds * 2.0 ** (without_progress - 1), LONGEST_DELAY_SECONDS)


def committed_by(attempt: AttemptStatus) -> int:
    """Steps that an attempt committed."""
    return 0 if attempt.to_step is None else max(0, attempt.to_step - attempt.from_step + 1)
