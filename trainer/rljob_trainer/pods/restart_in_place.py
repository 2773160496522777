"""Restart in place: a failed controller waits for the next attempt, for which its pods are restarted.

The operator writes the memory plan to the job's status, then the settings of the next attempt to the pods' ConfigMap,
then the record of that attempt, and finally its decision in the StepReport. The decision names the attempt and the
generation of its plan, and restarted containers wait for settings with these (`attempt_start`). Pods that are to be
replaced are deleted instead, and the signal ends the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from rljob_api.exit_codes import ExitCode
from rljob_api.step_report import PendingExit, StepReportStatus
from rljob_trainer.pods.attempt_start import RequiredAttempt
from rljob_trainer.step_report.api_server import NoAnswer

WAIT_SECONDS = 60.0
MAY_RESTART_IN_PLACE = frozenset(
    {
        ExitCode.DEVICE_OUT_OF_MEMORY,
        ExitCode.HOST_OUT_OF_MEMORY,
        ExitCode.SHARED_MEMORY_EXHAUSTED,
        ExitCode.WORKER_LOST,
    }
)
"""Failures after which new processes in the same pods can resume."""

_POLL_SECONDS = 1.0
_LONGEST_MESSAGE = 1024

Next = RequiredAttempt | Literal["End", "Wait"]
"""The attempt to restart the pods for, or the reason not to."""


def pending_exit(exit_code: ExitCode, message: str) -> PendingExit:
    """The StepReport's entry for an attempt that exits with `exit_code` unless it is restarted in place."""
    return PendingExit(exit_code=exit_code, message=message[:_LONGEST_MESSAGE])


def wait_for_restart(read_report: Callable[[], StepReportStatus | None], attempt: int) -> RequiredAttempt | None:
    """Wait for the operator's decision, for at most a minute.

    Returns the attempt for which the pods are to be restarted in place; None if they are not.

    `read_report`: returns the stored report; may raise `NoAnswer`.
    """
    give_up_at = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < give_up_at:
        try:
            report = read_report()
        except NoAnswer:
            report = None
        if (decided := next_for(report, attempt)) != "Wait":
            return None if decided == "End" else decided
        time.sleep(_POLL_SECONDS)
    return None


def next_for(report: StepReportStatus | None, attempt: int) -> Next:
    """The operator's decision for the failed pods of `attempt`. One for an earlier attempt does not count. Pure."""
    decision = report.decision if report else None
    if decision is None or decision.attempt != attempt:
        return "Wait"
    if decision.next_attempt is None:
        return "End"
    return RequiredAttempt(number=decision.next_attempt, plan_generation=decision.plan_generation or 1)
