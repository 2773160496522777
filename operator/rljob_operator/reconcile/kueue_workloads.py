"""Kueue's hold on pods that it has not admitted."""

from __future__ import annotations

from rljob_operator.names import kueue_group_name
from rljob_operator.reconcile.observed import Observed


def workloads_to_delete(observed: Observed) -> tuple[str, ...]:
    """Workloads of attempts whose pods are being deleted while they wait at Kueue's gate.

    Kueue keeps a finalizer on the pods of a group. It takes it off when the group has ended or the Workload is deleted:
    https://kueue.sigs.k8s.io/docs/tasks/troubleshooting/troubleshooting_pods/
    """
    if not observed.kueue_installed:
        return ()
    attempts = {pod.attempt for pod in observed.pods if pod.deleting and pod.gated}
    return tuple(kueue_group_name(observed.name, attempt) for attempt in sorted(attempts))
