"""Watches that fill the caches."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog

from rljob_operator import labels
from rljob_operator.kube.client import ApiClient, Connection
from rljob_operator.kube.resources import MEMORY_PROFILES, NODES, PODS, RLJOBS, STEP_REPORTS
from rljob_operator.kube.watch import Reflector
from rljob_operator.metrics import UNATTENDED_NAMESPACES
from rljob_operator.observe.observer import Observer
from rljob_operator.reconcile.observed import ObservedNode

_log = structlog.get_logger(__name__)

OWN_OBJECTS = f"{labels.MANAGED_BY}={labels.MANAGED_BY_OPERATOR}"
"""Selects objects of the operator, so that it does not receive foreign pods."""


def reflectors(
    client: ApiClient,
    observer: Observer,
    namespaces: tuple[str, ...],
    *,
    watch_nodes: bool,
    watch_profiles: bool = False,
) -> list[Reflector]:
    """Watches of RLJobs, pods, StepReports and MemoryProfiles in each namespace, or in all if `namespaces` is empty,
    and of nodes."""
    found = []
    for namespace in namespaces or (None,):
        found.append(Reflector(client, RLJOBS, observer.jobs, namespace=namespace))
        for resource, sink in ((PODS, observer.pods), (STEP_REPORTS, observer.step_reports)):
            found.append(Reflector(client, resource, sink, namespace=namespace, label_selector=OWN_OBJECTS))
        if watch_profiles:
            found.append(Reflector(client, MEMORY_PROFILES, observer.profiles, namespace=namespace, optional=True))
    if watch_nodes:
        found.append(Reflector(client, NODES, observer.nodes))
    return found


@asynccontextmanager
async def known_nodes(
    connection: Connection, gpu_resources: tuple[str, ...]
) -> AsyncIterator[Callable[[], Sequence[ObservedNode]]]:
    """Watch nodes alone, as a replica that does not lead; gives a function that returns the nodes it knows."""
    observer = Observer(gpu_resources, wake=lambda _: None)
    client = ApiClient(connection, concurrency=2)
    watching = asyncio.create_task(Reflector(client, NODES, observer.nodes).run())
    try:
        yield observer.observed_nodes
    finally:
        watching.cancel()
        await client.close()


class Attendance:
    """Namespaces whose jobs can be reconciled: all their RLJobs, pods and StepReports are in the caches.

    `attended` is called with each namespace that becomes complete; None stands for all namespaces.
    """

    def __init__(self, watches: Sequence[Reflector], attended: Callable[[str | None], None]) -> None:
        self._watches = defaultdict[str | None, list[Reflector]](list)
        self._complete = set[str | None]()
        self._unattended = set[str | None]()
        self._attended = attended
        for watch in watches:
            if watch.resource.namespaced and not watch.optional:
                self._watches[watch.namespace].append(watch)
                watch.attendance_changed = partial(self._update, watch.namespace)

    def includes(self, namespace: str) -> bool:
        return namespace in self._complete or None in self._complete

    def _update(self, namespace: str | None) -> None:
        watches = self._watches[namespace]
        unattended = any(watch.is_unattended for watch in watches)
        if unattended != (namespace in self._unattended):
            _log.warning("namespace unattended" if unattended else "namespace attended again", namespace=namespace)
            self._unattended ^= {namespace}
            UNATTENDED_NAMESPACES.set(len(self._unattended))
        complete = not unattended and all(watch.synced.is_set() for watch in watches)
        if complete and namespace not in self._complete:
            self._complete.add(namespace)
            self._attended(namespace)
        elif not complete:
            self._complete.discard(namespace)
