"""Failures that the kubelet reports about a pod as a whole: of an init container, and of a limit of the pod."""

from __future__ import annotations

from rljob_api.conditions import AttemptReason
from rljob_operator.reconcile.verdict import AttemptResult, Failed
from rljob_operator.reconcile.view import JobView


def init_container_failed(view: JobView) -> AttemptResult | None:
    """Result of an attempt with a pod whose init container failed, so that the trainer cannot start."""
    for pod in view.pods:
        failure = pod.failed_init_container
        if failure and not (pod.disruption or pod.deleting):
            sentence = failure.message("init container", pod.name)
            return AttemptResult(AttemptReason.INIT_CONTAINER_FAILED, sentence, Failed())
    return None


def evicted(view: JobView) -> AttemptResult | None:
    """Result of an attempt with a pod that was evicted because it exceeded a limit of its own."""
    for pod in view.pods:
        if pod.evicted is not None:
            why = pod.evicted.rstrip(". ") or "it exceeded a limit of its own"
            sentence = f"pod {pod.name} was evicted: {why}; raise that limit in spec.{pod.role}.template"
            return AttemptResult(AttemptReason.EVICTED, sentence, Failed(), pod.end.exit_code if pod.end else None)
    return None
