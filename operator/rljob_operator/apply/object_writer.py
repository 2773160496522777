"""Writes of the objects and pods of a job: applied, created once, verified, and never taken from another owner.

Objects are written concurrently, and pods after all objects that they need.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from rljob_operator import labels
from rljob_operator.apply.event_recorder import remembered
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    NamespaceGone,
    NotFound,
    Unavailable,
    WebhookFailed,
)
from rljob_operator.kube.lease import LeadershipLost
from rljob_operator.kube.resources import CONFIG_MAPS, PODS, RLJOBS, SECRETS, Object, resource_of
from rljob_operator.names import SHARED_ACCOUNT
from rljob_operator.objects.attempt import Manifest, is_shared
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.observed import ObservedJob

_log = structlog.get_logger(__name__)

_JOBS_REMEMBERED = 1024
_SHARED_KNOWN_SECONDS = 60.0
"""Time after which the objects that jobs share are applied again for the next one: somebody may have deleted them."""


@dataclass(slots=True)
class _Made:
    """Objects applied and created for one attempt of one job. Only saves writes: losing it costs a few."""

    attempt: str = ""
    digests: dict[tuple[str, str], bytes] = field(default_factory=dict)
    uids: dict[tuple[str, str], str] = field(default_factory=dict)


@dataclass(slots=True)
class _MadeForNamespace(_Made):
    """Objects applied for all jobs of one namespace."""

    applied_at: float = -math.inf
    """Time on the monotonic clock."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while they are applied: the other jobs of the namespace would apply them too."""


class ObjectWriter:
    """Writes the objects and pods of jobs. `saw` is called with each pod that a write returned."""

    def __init__(self, client: ApiClient, saw: Callable[[Object], None]) -> None:
        self._client = client
        self._saw = saw
        self._made: OrderedDict[str, _Made] = OrderedDict()
        """By the uid of the job."""
        self._shared: OrderedDict[str, _MadeForNamespace] = OrderedDict()

    async def verify(self, manifests: Sequence[Manifest]) -> None:
        """Create those objects again that were deleted."""
        for stage in _stages(manifests):
            await in_waves([partial(self._create_if_gone, manifest) for manifest in stage], LARGEST_WAVE)

    async def make(self, desired: Desired, job: ObservedJob) -> Exception | None:
        """Apply and create the objects and pods. Returns a refusal that the decision knew of; raises others."""
        try:
            await self._make(desired, job)
        except (Forbidden, Invalid, NotFound, WebhookFailed, MissingObject, ForeignObject, LeftBehind) as error:
            known = (
                job.refused or job.namespace_terminating or job.missing_object or job.foreign_object or job.left_behind
            )
            if not known or isinstance(error, NamespaceGone):
                raise
            return error
        return None

    async def _make(self, desired: Desired, job: ObservedJob) -> None:
        if not (desired.apply or desired.create):
            return
        made = self._made_for(job, desired)
        required = desired.required_config_map
        if required is not None and (CONFIG_MAPS.kind, required) not in made.digests:
            await self._require(required, job.namespace)
            made.digests[CONFIG_MAPS.kind, required] = b""
        own, bindings = _stages([manifest for manifest in desired.apply if not is_shared(manifest)])
        shared = [manifest for manifest in desired.apply if is_shared(manifest)]
        created = [manifest for manifest in desired.create if not _is_pod(manifest)]
        writes: list[Write] = [partial(self._apply_once, manifest, job, made) for manifest in own]
        writes += [partial(self._create_once, manifest, job, made) for manifest in created]
        await in_waves([partial(self._apply_shared, shared, job), *writes], LARGEST_WAVE)
        await in_waves([partial(self._apply_once, manifest, job, made) for manifest in bindings])
        try:
            pods = [manifest for manifest in desired.create if _is_pod(manifest)]
            await in_waves([partial(self._create_pod, manifest, job) for manifest in pods])
        except Forbidden as error:
            if f'serviceaccount "{SHARED_ACCOUNT}" not found' in error.message:
                self._shared.pop(job.namespace, None)
            raise

    def _made_for(self, job: ObservedJob, desired: Desired) -> _Made:
        """Records of the current attempt. A new attempt keeps the uids alone."""
        made = remembered(self._made, job.uid, _Made(), _JOBS_REMEMBERED)
        attempt = next((_attempt(manifest) for manifest in desired.create if _is_pod(manifest)), made.attempt)
        if attempt != made.attempt:
            made.attempt = attempt
            made.digests.clear()
        return made

    async def _require(self, config_map: str, namespace: str) -> None:
        try:
            await self._client.get_metadata(CONFIG_MAPS, config_map, namespace)
        except NamespaceGone:
            raise
        except NotFound as error:
            raise MissingObject(config_map, namespace) from error

    async def _apply_shared(self, manifests: Sequence[Manifest], job: ObservedJob) -> None:
        """Apply the objects that all jobs of the namespace use, for one job at a time."""
        if not manifests:
            return
        made = remembered(self._shared, job.namespace, _MadeForNamespace(), _JOBS_REMEMBERED)
        async with made.turn:
            if time.monotonic() - made.applied_at > _SHARED_KNOWN_SECONDS:
                made.digests.clear()
                made.applied_at = time.monotonic()
            for manifest in manifests:
                await self._apply_once(manifest, job, made)

    async def _apply_once(self, manifest: Manifest, job: ObservedJob, made: _Made) -> None:
        """Apply the manifest, unless that was done already."""
        key, digest = _key(manifest), _digest(manifest)
        if made.digests.get(key) != digest:
            made.uids[key] = await self._create_or_apply(manifest, job, made.uids.get(key))
            made.digests[key] = digest

    async def _create_or_apply(self, manifest: Manifest, job: ObservedJob, uid: str | None) -> str:
        """Create the object, or apply the manifest to the one that the job has; returns its uid."""
        if uid is not None:
            with suppress(Conflict):  # it was deleted, or replaced
                return _uid(await self._client.apply(manifest, uid))
        resource, metadata = resource_of(manifest), manifest["metadata"]
        try:
            return _uid(await self._client.create(resource, manifest, metadata["namespace"]))
        except AlreadyExists:
            uid = await self._uid_if_owned(manifest, job)
            return _uid(await self._client.apply(manifest, uid))

    async def _create_once(self, manifest: Manifest, job: ObservedJob, made: _Made) -> None:
        """Create the object if the job does not have it yet."""
        if _key(manifest) in made.digests:
            return
        try:
            await self._client.create(resource_of(manifest), manifest, manifest["metadata"]["namespace"])
        except AlreadyExists:
            if manifest["kind"] != SECRETS.kind:  # its name has the uid of the job
                await self._uid_if_owned(manifest, job)
        made.digests[_key(manifest)] = b""

    async def _create_if_gone(self, manifest: Manifest) -> None:
        resource, (kind, name), namespace = resource_of(manifest), _key(manifest), manifest["metadata"]["namespace"]
        if kind != SECRETS.kind:  # which the operator may not read
            with suppress(NotFound):
                await self._client.get_metadata(resource, name, namespace)
                return
        with suppress(AlreadyExists):
            await self._client.create(resource, manifest, namespace)
            _log.warning("created again, because it was deleted while the job runs", kind=kind, name=name)

    async def _uid_if_owned(self, manifest: Manifest, job: ObservedJob) -> str:
        kind, name = _key(manifest)
        try:
            metadata = await self._client.get_metadata(resource_of(manifest), name, manifest["metadata"]["namespace"])
        except NotFound as error:
            raise Conflict(f"{kind} {name} was deleted in the meantime") from error
        return require_shared(metadata, kind) if is_shared(manifest) else require_owned(metadata, kind, job)

    async def _create_pod(self, manifest: Manifest, job: ObservedJob) -> None:
        """Create the pod if the job does not have it yet. Raises NameTaken if another pod has its name."""
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        try:
            pod = await self._client.create(PODS, manifest, namespace)
        except AlreadyExists:
            try:
                pod = await self._client.get(PODS, name, namespace)
            except NotFound as error:
                raise Conflict(f"pod {name} was deleted in the meantime") from error
            owners = pod["metadata"].get("ownerReferences") or ()
            if not any(owner["uid"] == job.uid and owner.get("controller") for owner in owners):
                if "deletionTimestamp" in pod["metadata"] and any(belonged_to(owner, job) for owner in owners):
                    raise LeftBehind(PODS.kind, name) from None
                raise NameTaken(name) from None
        self._saw(pod)


class NameTaken(Exception):
    """A foreign pod has a name that the job needs."""

    def __init__(self, pod: str) -> None:
        super().__init__(f"pod {pod} exists and does not belong to the job")
        self.pod = pod


class MissingObject(Exception):
    """The ConfigMap that the job names does not exist."""

    def __init__(self, name: str, namespace: str) -> None:
        field = "spec.task.files.configMap"
        super().__init__(f"expected ConfigMap {name} ({field}) in namespace {namespace}, found none: create it")


def _is_pod(manifest: Manifest) -> bool:
    return bool(manifest["kind"] == PODS.kind)


def _stages(manifests: Sequence[Manifest]) -> tuple[list[Manifest], list[Manifest]]:
    """Objects that can be written at the same time, and those that follow them: the API server refuses a RoleBinding
    whose Role does not exist."""
    bindings = [manifest for manifest in manifests if manifest["kind"] == "RoleBinding"]
    return [manifest for manifest in manifests if manifest not in bindings], bindings


def _attempt(manifest: Manifest) -> str:
    return str(manifest["metadata"]["labels"][labels.ATTEMPT])


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _digest(manifest: Manifest) -> bytes:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).digest()


def _uid(obj: Object) -> str:
    return str(obj["metadata"].get("uid", ""))


# --- Ownership ---


class ForeignObject(Exception):
    """An object that does not belong to the job has a name that the job needs."""

    def __init__(self, kind: str, name: str, advice: str | None = None) -> None:
        super().__init__(f"{kind} {name} exists and does not belong to this job: {advice or _advice(kind)}")


class LeftBehind(Unavailable):
    """The object belongs to a deleted job of the same name, until garbage collection removes it."""

    def __init__(self, kind: str, name: str, finalizers: Sequence[str] = ()) -> None:
        kept = f", which its finalizers prevent: {', '.join(finalizers)}" if finalizers else ""
        super().__init__(
            f"{kind} {name} belongs to a deleted job of this name; waiting for its garbage collection{kept}"
        )


def require_owned(metadata: Object, kind: str, job: ObservedJob) -> str:
    """uid of the object, which belongs to the job. Raises ForeignObject and LeftBehind."""
    owners = metadata.get("ownerReferences") or ()
    marks = metadata.get("labels") or {}
    is_retained = kind == "PersistentVolumeClaim" and not owners and labels.RETAINED in marks
    if any(owner.get("uid") == job.uid for owner in owners) or (is_retained and marks.get(labels.JOB_UID) == job.uid):
        return str(metadata["uid"])
    if any(belonged_to(owner, job) for owner in owners):
        raise LeftBehind(kind, metadata["name"], metadata.get("finalizers") or ())
    if is_retained and marks.get(labels.JOB_NAME) == job.name:
        raise ForeignObject(kind, metadata["name"], _resume_advice(metadata["name"]))
    raise ForeignObject(kind, metadata["name"])


def require_shared(metadata: Object, kind: str) -> str:
    """uid of the object, which the operator has made for all jobs of its namespace. Raises ForeignObject."""
    marks = metadata.get("labels") or {}
    made_by_operator = marks.get(labels.MANAGED_BY) == labels.MANAGED_BY_OPERATOR and labels.SHARED in marks
    if not made_by_operator or metadata.get("ownerReferences"):
        advice = "every job of the namespace needs that name; delete or rename that object"
        raise ForeignObject(kind, metadata["name"], advice)
    return str(metadata["uid"])


def belonged_to(owner: Object, job: ObservedJob) -> bool:
    """The owner is a job of this name, which is not this one."""
    return owner.get("kind") == RLJOBS.kind and owner.get("name") == job.name and owner.get("uid") != job.uid


def _advice(kind: str) -> str:
    if kind == "PersistentVolumeClaim":
        return (
            "to use it, delete the job and create it again with checkpoint.volume.persistentVolumeClaim.claimName; "
            "otherwise rename the job"
        )
    return "rename the job, or delete that object"


def _resume_advice(claim: str) -> str:
    """Advice about a claim that an earlier job of the same name has left, as it was asked to."""
    return (
        "it has the checkpoints of an earlier job of this name; to resume from them, create the job with checkpoint: "
        f"{{volume: {{persistentVolumeClaim: {{claimName: {claim}}}}}}}; otherwise delete the claim, or rename the job"
    )


# --- Waves ---


FIRST_WAVE = 4
LARGEST_WAVE = 16
"""A job of a thousand pods must not keep the requests of all other jobs waiting."""

Write = Callable[[], Coroutine[Any, Any, None]]


async def in_waves(writes: Sequence[Write], first: int = FIRST_WAVE) -> None:
    """Run `writes`: `first` at once, then waves of twice the size, at most LARGEST_WAVE.

    A failure ends the waves, so that a refusal by a quota costs few requests. The other writes of its wave are
    finished. Raises the error of the first write that failed, in the order of `writes`, or LeadershipLost.
    """
    begin, size = 0, min(first, LARGEST_WAVE)
    while begin < len(writes):
        wave = writes[begin : begin + size]
        done = await asyncio.gather(*(write() for write in wave), return_exceptions=True)
        errors = [result for result in done if result is not None]
        if errors:
            raise next((error for error in errors if isinstance(error, LeadershipLost)), errors[0])
        begin, size = begin + len(wave), min(2 * size, LARGEST_WAVE)
