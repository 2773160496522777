"""Which watches keep the caches fresh."""

from __future__ import annotations

from rljob_operator import labels
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.resources import NODES, PODS, STEP_REPORTS
from rljob_operator.kube.watch import Reflector
from rljob_operator.observe.observer import Observer

OWN_OBJECTS = f"{labels.MANAGED_BY}={labels.MANAGED_BY_OPERATOR}"
"""Selects what the operator made: it never sees the pods of anybody else."""


def reflectors(
    client: ApiClient, observer: Observer, namespaces: tuple[str, ...], *, watch_nodes: bool
) -> list[Reflector]:
    """Watches of pods and StepReports, a pair a namespace or one for all, and of nodes. RLJobs come from kopf."""
    found = [
        Reflector(client, resource, sink, namespace=namespace, label_selector=OWN_OBJECTS)
        for namespace in namespaces or (None,)
        for resource, sink in ((PODS, observer.pods), (STEP_REPORTS, observer.step_reports))
    ]
    if watch_nodes:
        found.append(Reflector(client, NODES, observer.nodes))
    return found
