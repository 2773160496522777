"""Reports out-of-memory failures of pods with the label `rljob.dev/diagnose=true`: Events and a metric.

It writes nothing else, and keeps no pods. Any user may label any number of pods, so that everything is bounded: each
namespace has its own allowance, and the queue, the records of reported failures and the text of an Event are limited.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from datetime import UTC, datetime, timedelta

import structlog

from rljob_operator import labels
from rljob_operator.apply.event_recorder import EventRecorder, remembered
from rljob_operator.diagnose.explanation import (
    ContainerEnd,
    OutOfMemoryCause,
    container_ends,
    controller_of,
    explanation_of,
)
from rljob_operator.events import EventNote, Subject
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import AlreadyExists, ApiError
from rljob_operator.kube.resources import WORKLOAD_OWNERS, Object, Resource
from rljob_operator.kube.watch import Key
from rljob_operator.metrics import DIAGNOSED_FAILURES, EVENTS_DROPPED
from rljob_operator.token_bucket import TokenBucket

_log = structlog.get_logger(__name__)

SELECTOR = f"{labels.DIAGNOSE}=true,{labels.MANAGED_BY}!={labels.MANAGED_BY_OPERATOR}"
"""Pods of RLJobs are reported as failures of their job."""
REASON = "OutOfMemory"

_MAX_WAITING = 1000
_MAX_KNOWN = 8192
_BURST = 100
_SECONDS_PER_TOKEN = 10.0
"""Failures of a namespace that are reported: 100 at once, then one every ten seconds."""
_OLDEST = timedelta(minutes=30)
"""Older failures were reported when they happened. The Event of a failure, which prevents a second report of it, is
kept for an hour (the API server's --event-ttl)."""


class LabelledPods:
    """Sink of the watch of labelled pods."""

    def __init__(self, client: ApiClient, recorder: EventRecorder) -> None:
        self._client = client
        self._recorder = recorder
        self._waiting: asyncio.Queue[tuple[ContainerEnd, OutOfMemoryCause]] = asyncio.Queue(_MAX_WAITING)
        self._known: OrderedDict[str, None] = OrderedDict()
        self._tokens: OrderedDict[str, TokenBucket] = OrderedDict()

    # --- the watch ---

    def put(self, obj: Object) -> None:
        for end in container_ends(obj):
            is_old = end.finished_at is not None and datetime.now(UTC) - end.finished_at > _OLDEST
            if end.key not in self._known and not is_old:
                self._take(end)

    def remove(self, obj: Object) -> None:
        """A pod that is deleted while it runs shows how its containers ended only in its last state."""
        self.put(obj)

    def keep_only(self, keys: set[Key], resource_version: str, namespace: str | None) -> None:
        """Nothing is kept."""

    def _take(self, end: ContainerEnd) -> None:
        remembered(self._known, end.key, None, _MAX_KNOWN)
        tokens = remembered(self._tokens, end.namespace, TokenBucket(_BURST, _SECONDS_PER_TOKEN))
        if tokens.seconds_left(time.monotonic()):  # asked first: a diagnosis takes up to 20 ms
            EVENTS_DROPPED.inc()
            return
        explanation = explanation_of(end)
        if explanation is None:
            return
        tokens.take(time.monotonic())
        try:
            self._waiting.put_nowait((end, explanation))
        except asyncio.QueueFull:
            EVENTS_DROPPED.inc()

    # --- the reports ---

    async def run(self) -> None:
        """Report failures until cancelled."""
        while True:
            end, explanation = await self._waiting.get()
            try:
                await self._report(end, explanation)
            except ApiError as error:
                EVENTS_DROPPED.inc()
                _log.warning("event not recorded", pod=end.pod, namespace=end.namespace, error=error.message)
            finally:
                self._waiting.task_done()

    async def flush(self) -> None:
        """Return when all failures that were seen are reported or dropped."""
        await self._waiting.join()

    async def _report(self, end: ContainerEnd, explanation: OutOfMemoryCause) -> None:
        """Count and report a failure, unless an earlier process of the operator has."""
        pod = Subject("v1", "Pod", end.namespace, end.pod, end.pod_uid)
        try:
            await self._recorder.create(f"{end.pod[:200]}.{end.key}", pod, _note(explanation.message))
        except AlreadyExists:
            return
        top = await top_owner(self._client, end)
        DIAGNOSED_FAILURES.labels(explanation.class_name, top.kind if top else "Pod").inc()
        _log.info("out of memory", namespace=end.namespace, pod=end.pod, cause=explanation.class_name)
        if top:
            self._recorder.record_about(top, _note(f"pod {end.pod}: {explanation.message}"))


def _note(message: str) -> EventNote:
    return EventNote("Warning", REASON, message)


# --- Owners ---


_LONGEST_CHAIN = 4
"""Pod, Job, JobSet, TrainJob; or pod, RayCluster, RayJob."""
_VERSION = re.compile(r"v[0-9]+((alpha|beta)[0-9]+)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


async def top_owner(client: ApiClient, end: ContainerEnd) -> Subject | None:
    """The topmost verified owner; None if the pod has none of a known kind.

    Owner references are written by the author of an object: a reference counts only if an object of that name has
    that uid.
    """
    top, claimed = None, end.owner
    for _ in range(_LONGEST_CHAIN):
        resource = owner_resource(claimed) if claimed else None
        if claimed is None or resource is None:
            break
        try:
            metadata = await client.get_metadata(resource, claimed.name, end.namespace)
        except ApiError:
            break
        if metadata.get("uid") != claimed.uid:
            break
        top, claimed = claimed, controller_of(metadata, end.namespace)
    return top


def owner_resource(owner: Subject) -> Resource | None:
    """The resource of an owner of a known kind; None if its reference is not one that the API server would accept."""
    group, _, version = owner.api_version.partition("/")
    known = WORKLOAD_OWNERS.get((group, owner.kind))
    if known is None or not _VERSION.fullmatch(version) or not _NAME.fullmatch(owner.name):
        return None
    return Resource(group, version, owner.kind, known)
