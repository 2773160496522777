"""The answer to a controller that waits: whether its containers restart in place, and for which attempt and plan."""

from __future__ import annotations

from rljob_api.step_report import ExitDecision
from rljob_operator.reconcile.view import JobView, is_finished


def exit_decision(view: JobView) -> ExitDecision | None:
    """The decision that a waiting controller is to be given; None if none waits, or if it has it.

    Taken from the stored status, so that it follows the record of the next attempt and the settings in the ConfigMap. A
    controller whose pods are replaced gets none: its pod is deleted, and the signal ends the wait.
    """
    report = view.report
    waits = any(pod.role == "controller" and not pod.ended and not pod.deleting for pod in view.observed.pods)
    if not waits or report is None or report.attempt is None or report.pending_exit is None:
        return None
    decision = _decision_about(report.attempt, view)
    return None if decision == report.decision else decision


def _decision_about(waiting: int, view: JobView) -> ExitDecision | None:
    latest = view.attempt
    if is_finished(view.status):
        return ExitDecision(attempt=waiting)
    if latest is None or latest.number <= waiting or latest.pods_of_attempt is None:
        return None
    return ExitDecision(attempt=waiting, next_attempt=latest.number, plan_generation=latest.plan_generation)
