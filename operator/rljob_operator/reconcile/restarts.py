"""How often a job is started again after failures, and how long it waits in between."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.conditions import AttemptReason
from rljob_api.status import AttemptStatus

STEPS_THAT_FORGIVE_A_RESTART = 10
"""An attempt that commits so many steps, or half of those that remained, gives one restart back."""

LONGEST_DELAY_SECONDS = 300.0

ASKED_FOR = frozenset(
    {
        AttemptReason.SUSPEND_REQUESTED,
        AttemptReason.STEPS_RAISED,
        AttemptReason.PLACEMENT_TIMED_OUT,
        AttemptReason.NOT_RESTARTED_IN_PLACE,
        AttemptReason.ALL_STEPS_COMMITTED,
    }
)
"""Ends that are no failures: nothing has to recover from them."""


def restarts_left_standing(restarts: int, ended: AttemptStatus, steps: int) -> int:
    """`restarts` after `ended` gave one back, where it got far enough."""
    committed = committed_by(ended)
    remained = steps - ended.from_step + 1
    forgiven = committed >= 1 and committed >= min(STEPS_THAT_FORGIVE_A_RESTART, -(-remained // 2))
    return max(0, restarts - 1) if forgiven else restarts


def restart_delay_seconds(attempts: Sequence[AttemptStatus], first_delay_seconds: float) -> float:
    """Wait between the end of the last of `attempts` and the next.

    None after progress, a change of the memory plan, or an end that was asked for.
    Doubled with each further attempt that committed nothing, whoever was to blame.
    """
    in_vain = 0
    for attempt in reversed(attempts):
        if attempt.reason in ASKED_FOR or attempt.remedy is not None or committed_by(attempt) > 0:
            break
        in_vain += 1
    if in_vain == 0:
        return 0.0
    return min(first_delay_seconds * 2.0 ** (in_vain - 1), LONGEST_DELAY_SECONDS)


def account_of_restarts(why: str, attempts: Sequence[AttemptStatus], max_restarts: int) -> str:
    """Why the restarts are used up, for the message of the condition. `why`: the end of the last of `attempts`."""
    sentence = f"attempt {attempts[-1].number} ended: {why}"
    if max_restarts == 0:
        return f"{sentence} (recovery.maxRestarts is 0)"
    earlier = [f"{attempt.number}: {attempt.reason}" for attempt in attempts[:-1] if attempt.reason not in ASKED_FOR]
    before = f"; attempts before it: {', '.join(earlier)}" if earlier else ""
    return f"{sentence} (all restarts used, recovery.maxRestarts is {max_restarts}{before})"


def committed_by(attempt: AttemptStatus) -> int:
    """Steps that an attempt committed."""
    return 0 if attempt.to_step is None else max(0, attempt.to_step - attempt.from_step + 1)
