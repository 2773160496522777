"""The order in which pods go: the controller first, since it needs the workers to commit the step in hand."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_operator.reconcile.desired import PodDeletion
from rljob_operator.reconcile.observed import ObservedPod


def next_deletions(pods: Sequence[ObservedPod]) -> tuple[PodDeletion, ...]:
    """The pods that may be deleted now, so that in the end all have gone. Those that are going already are let be."""
    running_controllers = [pod for pod in pods if pod.role == "controller" and not pod.ended]
    first = running_controllers or pods
    return tuple(PodDeletion(pod.name, pod.uid) for pod in first if not pod.deleting)
