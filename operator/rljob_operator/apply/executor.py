"""Executes decisions: writes in the order of the fields of Desired, up to the first one that fails."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from rljob_operator import labels
from rljob_operator.apply.event_recorder import EventRecorder
from rljob_operator.apply.ownership import ForeignObject, LeftBehind, require_owned
from rljob_operator.apply.status_patch import condition_patch, merge_patch, status_object
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, NamespaceGone, NotFound
from rljob_operator.kube.resources import PODS, RLJOBS, SECRETS, WORKLOADS, Object, resource_of
from rljob_operator.kube.watch import Key
from rljob_operator.observation import Observation
from rljob_operator.reconcile.bug_report import BugReport
from rljob_operator.reconcile.desired import Desired, Manifest, PodDeletion
from rljob_operator.reconcile.observed import Observed


class JobGone(Exception):
    """The job was deleted after it was last observed."""


class NameTaken(Exception):
    """A foreign pod has a name that the job needs."""

    def __init__(self, pod: str) -> None:
        super().__init__(f"pod {pod} exists and does not belong to the job")
        self.pod = pod


@dataclass(slots=True)
class _Made:
    """Objects applied and created for one attempt of one job. Only saves writes: losing it costs a few."""

    uid: str
    attempt: str | None
    digests: dict[tuple[str, str], bytes] = field(default_factory=dict)
    uids: dict[tuple[str, str], str] = field(default_factory=dict)


class Executor:
    """Executes decisions. `saw` is called with each object that a write returned."""

    def __init__(self, client: ApiClient, recorder: EventRecorder, saw: Callable[[Object], None]) -> None:
        self._client = client
        self._recorder = recorder
        self._saw = saw
        self._made: dict[Key, _Made] = {}

    def forget(self, job: Key) -> None:
        """Drop the records of a job that is gone."""
        self._made.pop(job, None)

    async def execute(self, desired: Desired, observation: Observation) -> None:
        """Execute all writes of `desired`.

        Raises Conflict if the job has changed since, JobGone, NameTaken, ForeignObject, LeftBehind, and the errors of
        `kube.errors`.
        """
        job, version = observation.observed, observation.resource_version
        if desired.finalizer is True:
            version = await self._set_finalizers(job, version, (*observation.finalizers, labels.FINALIZER))
        refusal = await self._make_objects_or_refusal(desired, job)
        for deletion in desired.delete_pods:
            await self._delete_pod(deletion, job)
        for workload in desired.delete_workloads:
            await self._delete_workload(workload, job)
        if desired.delete_job:
            await self._delete_job(job)
            return
        if desired.status is not None:
            status_patch = merge_patch(observation.status, status_object(desired.status))
            version = await self._write_status(job, version, status_patch)
        for note in desired.events:
            self._recorder.record(job, note)
        if desired.finalizer is False:
            left = tuple(finalizer for finalizer in observation.finalizers if finalizer != labels.FINALIZER)
            await self._set_finalizers(job, version, left)
        if refusal is not None:
            raise refusal

    async def report(self, bug: BugReport, observation: Observation) -> None:
        """Write the report into the status of the job, if it is not there already."""
        content = {"reason": bug.reason.value, "message": bug.event.message}
        job = observation.observed
        if patch := condition_patch(observation.status, bug.condition, content, job.generation):
            await self._write_status(job, observation.resource_version, patch)
            self._recorder.record(job, bug.event)

    # --- the job itself: each write names the resourceVersion that it was made for ---

    async def _set_finalizers(self, job: Observed, version: str, finalizers: tuple[str, ...]) -> str:
        return await self._patch_job(job, {"metadata": {"resourceVersion": version, "finalizers": list(finalizers)}})

    async def _write_status(self, job: Observed, version: str, status_patch: Object) -> str:
        if not status_patch:
            return version
        patch = {"metadata": {"resourceVersion": version}, "status": status_patch}
        return await self._patch_job(job, patch, "status")

    async def _patch_job(self, job: Observed, patch: Object, subresource: str | None = None) -> str:
        try:
            written = await self._client.patch(RLJOBS, job.name, patch, job.namespace, subresource)
        except NotFound as error:
            raise JobGone(error.message) from error
        self._saw(written)
        return str(written["metadata"]["resourceVersion"])

    async def _delete_job(self, job: Observed) -> None:
        try:
            self._saw(await self._client.delete(RLJOBS, job.name, job.namespace, uid=job.uid))
        except NotFound as error:
            raise JobGone(error.message) from error

    # --- the objects of the job ---

    async def _make_objects_or_refusal(self, desired: Desired, job: Observed) -> Exception | None:
        """Apply and create objects. Returns a refusal that the decision knew of: the rest is executed."""
        try:
            await self._make_objects(desired, job)
        except (Forbidden, Invalid, NotFound, ForeignObject, LeftBehind) as error:
            known = job.refused or job.namespace_terminating or job.foreign_object or job.left_behind
            if not known or isinstance(error, NamespaceGone):
                raise
            return error
        return None

    async def _make_objects(self, desired: Desired, job: Observed) -> None:
        if not (desired.apply or desired.create):
            return
        made = self._made_for(job, desired)
        for manifest in desired.apply:
            key, digest = _key(manifest), _digest(manifest)
            if made.digests.get(key) != digest:
                made.uids[key] = await self._create_or_apply(manifest, job, made.uids.get(key))
                made.digests[key] = digest
        for manifest in desired.create:
            if _is_pod(manifest):
                self._saw(await self._create_pod(manifest, job))
            elif _key(manifest) not in made.digests:
                await self._create(manifest, job)
                made.digests[_key(manifest)] = b""

    def _made_for(self, job: Observed, desired: Desired) -> _Made:
        """Records of the current attempt. A new attempt keeps the uids alone."""
        key = (job.namespace, job.name)
        known = self._made.get(key)
        attempt = next((_attempt(manifest) for manifest in desired.create if _is_pod(manifest)), None)
        if known is None or known.uid != job.uid:
            known = self._made[key] = _Made(job.uid, attempt)
        elif attempt not in (None, known.attempt):
            known = self._made[key] = _Made(job.uid, attempt, uids=known.uids)
        return known

    async def _create_or_apply(self, manifest: Manifest, job: Observed, uid: str | None) -> str:
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

    async def _create(self, manifest: Manifest, job: Observed) -> None:
        """Create the object if the job does not have it yet."""
        try:
            await self._client.create(resource_of(manifest), manifest, manifest["metadata"]["namespace"])
        except AlreadyExists:
            if manifest["kind"] != SECRETS.kind:  # its name has the uid of the job
                await self._uid_if_owned(manifest, job)

    async def _uid_if_owned(self, manifest: Manifest, job: Observed) -> str:
        kind, name = _key(manifest)
        try:
            metadata = await self._client.get_metadata(resource_of(manifest), name, manifest["metadata"]["namespace"])
        except NotFound as error:
            raise Conflict(f"{kind} {name} was deleted in the meantime") from error
        return require_owned(metadata, kind, job)

    async def _create_pod(self, manifest: Manifest, job: Observed) -> Object:
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        try:
            return await self._client.create(PODS, manifest, namespace)
        except AlreadyExists:
            pass
        try:
            pod = await self._client.get(PODS, name, namespace)
        except NotFound as error:
            raise Conflict(f"pod {name} was deleted in the meantime") from error
        owners = pod["metadata"].get("ownerReferences") or ()
        if any(owner["uid"] == job.uid and owner.get("controller") for owner in owners):
            return pod
        raise NameTaken(name)

    async def _delete_pod(self, deletion: PodDeletion, job: Observed) -> None:
        """Delete the pod, unless it is gone or replaced by another one of its name."""
        try:
            pod = await self._client.delete(
                PODS, deletion.name, job.namespace, uid=deletion.uid, grace_seconds=deletion.grace_seconds
            )
        except (NotFound, Conflict):
            return
        self._saw(pod)

    async def _delete_workload(self, name: str, job: Observed) -> None:
        with suppress(NotFound):
            await self._client.delete(WORKLOADS, name, job.namespace)


def _is_pod(manifest: Manifest) -> bool:
    return bool(manifest["kind"] == PODS.kind)


def _attempt(manifest: Manifest) -> str:
    return str(manifest["metadata"]["labels"][labels.ATTEMPT])


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _digest(manifest: Manifest) -> bytes:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).digest()


def _uid(obj: Object) -> str:
    return str(obj["metadata"].get("uid", ""))
