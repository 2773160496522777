"""Pods whose containers start anew in place again and again, without being asked to.

A container that finds the environment of an attempt that is over asks for one more restart, until its node knows the
new one; a container of the template may ask for restarts too, before that one has even begun. The kubelet has no
back-off for such restarts, and the pod never fails by them: somebody has to count.
"""

from __future__ import annotations

from rljob_api.conditions import AttemptReason
from rljob_api.exit_codes import ExitCode
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.verdict import AttemptEnd, Failed
from rljob_operator.reconcile.view import JobView

MOST_RESTARTS = 30
"""Of one pod in one attempt. A restart takes at least 2 s, and a node knows of a changed ConfigMap within a minute."""


def caught_in_restarts(view: JobView) -> AttemptEnd | None:
    """The end of an attempt of which a pod does not get to work for restarts. It counts, and the pods are replaced."""
    for pod in view.pods:
        restarts = _restarts_in_this_attempt(pod, view)
        if pod.restarts_in_place and restarts > MOST_RESTARTS:
            sentence = (
                f"pod {pod.name} was restarted in place {restarts} times in this attempt, on node {pod.node}: its node "
                "does not learn of the attempt's ConfigMap, or a container of the template asks for restarts; "
                f"kubectl logs {pod.name} --all-containers says which"
            )
            return AttemptEnd(AttemptReason.RESTART_LOOP, sentence, Failed(), ExitCode.RESTART_IN_PLACE)
    return None


def _restarts_in_this_attempt(pod: ObservedPod, view: JobView) -> int:
    assert view.attempt is not None
    return pod.restart_count - view.attempt.restarts_before.get(pod.name, 0)
