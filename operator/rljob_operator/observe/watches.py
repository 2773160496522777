"""Watches that fill the caches."""

from __future__ import annotations

from rljob_operator import labels
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.resources import NODES, PODS, RLJOBS, STEP_REPORTS
from rljob_operator.kube.watch import Reflector
from rljob_operator.observe.observer import Observer

OWN_OBJECTS = f"{labels.MANAGED_BY}={labels.MANAGED_BY_OPERATOR}"
"""Selects objects of the operator, so that it does not receive foreign pods."""


def reflectors(
    client: ApiClient, observer: Observer, namespaces: tuple[str, ...], *, watch_nodes: bool
) -> list[Reflector]:
    """Watches of RLJobs, pods and StepReports in each namespace, or in all if `namespaces` is empty, and of nodes."""
    found = []
    for namespace in namespaces or (None,):
        found.append(Reflector(client, RLJOBS, observer.jobs, namespace=namespace))
        for resource, sink in ((PODS, observer.pods), (STEP_REPORTS, observer.step_reports)):
            found.append(Reflector(client, resource, sink, namespace=namespace, label_selector=OWN_OBJECTS))
    if watch_nodes:
        found.append(Reflector(client, NODES, observer.nodes))
    return found
