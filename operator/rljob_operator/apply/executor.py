"""Executes decisions: writes in the order of the fields of Desired, up to the first field of which a write fails.

Objects of one field are written concurrently, and pods after all objects that they need.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import structlog

from rljob_api.step_report import ExitDecision
from rljob_operator import labels
from rljob_operator.apply.event_recorder import EventRecorder, remembered
from rljob_operator.apply.ownership import ForeignObject, LeftBehind, belonged_to, require_owned, require_shared
from rljob_operator.apply.status_patch import condition_patch, merge_patch, status_object
from rljob_operator.apply.waves import LARGEST_WAVE, in_waves
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    NamespaceGone,
    NotFound,
    WebhookFailed,
)
from rljob_operator.kube.resources import (
    CONFIG_MAPS,
    PODS,
    RLJOBS,
    SECRETS,
    STEP_REPORTS,
    WORKLOADS,
    Object,
    resource_of,
)
from rljob_operator.kube.watch import Key
from rljob_operator.names import SHARED_ACCOUNT
from rljob_operator.objects.metadata import is_shared
from rljob_operator.observation import Observation
from rljob_operator.reconcile.desired import BugReport, Desired, Manifest, PodDeletion, RequiredObject
from rljob_operator.reconcile.observed import Observed


class JobGone(Exception):
    """The job was deleted after it was last observed."""


class NameTaken(Exception):
    """A foreign pod has a name that the job needs."""

    def __init__(self, pod: str) -> None:
        super().__init__(f"pod {pod} exists and does not belong to the job")
        self.pod = pod


class MissingObject(Exception):
    """An object that the job names does not exist."""

    def __init__(self, kind: str, required: RequiredObject) -> None:
        super().__init__(
            f"expected {kind} {required.name} ({required.field}) in namespace {required.namespace}, found none: "
            "create it"
        )


_log = structlog.get_logger(__name__)

_JOBS_REMEMBERED = 1024


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
        self.workloads = WORKLOADS
        """Kueue's Workloads, in the version that the API server serves."""
        self._client = client
        self._recorder = recorder
        self._saw = saw
        self._made: OrderedDict[Key, _Made] = OrderedDict()
        self._shared: OrderedDict[str, _Made] = OrderedDict()
        """By namespace: what all its jobs use."""
        self._others: OrderedDict[str, None] = OrderedDict()
        """Other installations of the operator that were logged."""
        self._decisions: dict[Key, tuple[str, ExitDecision]] = {}

    def forget(self, job: Key) -> None:
        """Drop the records of a job that is gone."""
        self._made.pop(job, None)
        self._decisions.pop(job, None)

    async def execute(self, desired: Desired, observation: Observation) -> None:
        """Execute all writes of `desired`.

        Raises Conflict if the job has changed since, JobGone, NameTaken, MissingObject, ForeignObject, LeftBehind, and
        the errors of `kube.errors`.
        """
        job, version = observation.observed, observation.resource_version
        if desired.left_to is not None:
            if desired.left_to not in self._others:
                _log.warning("jobs of another operator", operator=desired.left_to, job=job.name)
            remembered(self._others, desired.left_to, None, _JOBS_REMEMBERED)
        claimed = {} if desired.claim is None else {"annotations": {labels.OPERATOR: desired.claim}}
        added = {"finalizers": [*observation.finalizers, labels.FINALIZER]} if desired.finalizer is True else {}
        if claimed or added:
            version = await self._patch_metadata(job, version, {**claimed, **added})
        refusal = await self._make_objects_or_refusal(desired, job)
        await in_waves([partial(self._delete_pod, deletion, job) for deletion in desired.delete_pods], LARGEST_WAVE)
        for workload in desired.delete_workloads:
            await self.delete_workload(workload, job.namespace)
        if desired.decision is not None:
            await self._write_decision(desired.decision, job)
        if desired.delete_job:
            await self._delete_job(job)
            return
        if desired.status is not None:
            status_patch = merge_patch(observation.status, status_object(desired.status))
            version = await self._write_status(job, version, status_patch)
        for note in desired.events:
            self._recorder.record(job, note)
        if desired.finalizer is False:
            left = [finalizer for finalizer in observation.finalizers if finalizer != labels.FINALIZER]
            await self._patch_metadata(job, version, {"finalizers": left})
        if refusal is not None:
            raise refusal
        # Last: a refusal holds up nothing else.
        await in_waves([partial(self._create_gone, them) for them in _in_turn(desired.verify)], LARGEST_WAVE)

    async def report(self, bug: BugReport, observation: Observation) -> None:
        """Write the report into the status of the job, if it is not there already."""
        content = {"reason": bug.reason.value, "message": bug.event.message}
        job = observation.observed
        if patch := condition_patch(observation.status, bug.condition, content, job.generation):
            await self._write_status(job, observation.resource_version, patch)
            self._recorder.record(job, bug.event)

    # --- the job itself: each write names the resourceVersion that it was made for ---

    async def _patch_metadata(self, job: Observed, version: str, metadata: Object) -> str:
        return await self._patch_job(job, {"metadata": {"resourceVersion": version, **metadata}})

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

    async def _write_decision(self, decision: ExitDecision, job: Observed) -> None:
        """Write it once: a pod that overwrites the decision harms itself alone.

        Raises Conflict if the report was changed or replaced since it was observed.
        """
        key = (job.namespace, job.name)
        if self._decisions.get(key) == (job.uid, decision):
            return
        content = decision.model_dump(mode="json", by_alias=True)  # null removes a field of an earlier decision
        # The API server ignores a uid in a patch of a custom resource's status: the version identifies the report.
        patch = {"metadata": {"resourceVersion": job.step_report_version}, "status": {"decision": content}}
        with suppress(NotFound):  # somebody has deleted the report: the next round makes it again
            await self._client.patch(STEP_REPORTS, job.name, patch, job.namespace, "status")
            self._decisions[key] = (job.uid, decision)

    # --- the objects of the job ---

    async def _make_objects_or_refusal(self, desired: Desired, job: Observed) -> Exception | None:
        """Apply and create objects. Returns a refusal that the decision knew of: the rest is executed."""
        try:
            await self._make_objects(desired, job)
        except (Forbidden, Invalid, NotFound, WebhookFailed, MissingObject, ForeignObject, LeftBehind) as error:
            known = (
                job.refused or job.namespace_terminating or job.missing_object or job.foreign_object or job.left_behind
            )
            if not known or isinstance(error, NamespaceGone):
                raise
            return error
        return None

    async def _make_objects(self, desired: Desired, job: Observed) -> None:
        if not (desired.apply or desired.create):
            return
        made = self._made_for(job, desired)
        for required in desired.require:
            key = (CONFIG_MAPS.kind, required.name)
            if key not in made.digests:
                await self._require(required)
                made.digests[key] = b""
        pods = [manifest for manifest in desired.create if _is_pod(manifest)]
        others = [manifest for manifest in desired.create if not _is_pod(manifest)]
        applies = [partial(self._apply_in_turn, manifests, job, made) for manifests in _in_turn(desired.apply)]
        await in_waves(applies + [partial(self._create_once, manifest, job, made) for manifest in others], LARGEST_WAVE)
        try:
            await in_waves([partial(self._create_pod, manifest, job) for manifest in pods])
        except Forbidden as error:
            if f'serviceaccount "{SHARED_ACCOUNT}" not found' in error.message:
                self._shared.pop(job.namespace, None)
            raise

    def _made_for(self, job: Observed, desired: Desired) -> _Made:
        """Records of the current attempt. A new attempt keeps the uids alone."""
        key = (job.namespace, job.name)
        known = self._made.get(key)
        attempt = next((_attempt(manifest) for manifest in desired.create if _is_pod(manifest)), None)
        if known is None or known.uid != job.uid:
            known = self._made[key] = _Made(job.uid, attempt)
        elif attempt not in (None, known.attempt):
            known = self._made[key] = _Made(job.uid, attempt, uids=known.uids)
        self._made.move_to_end(key)
        if len(self._made) > _JOBS_REMEMBERED:
            self._made.popitem(last=False)
        return known

    async def _require(self, required: RequiredObject) -> None:
        try:
            await self._client.get_metadata(CONFIG_MAPS, required.name, required.namespace)
        except NamespaceGone:
            raise
        except NotFound as error:
            raise MissingObject(CONFIG_MAPS.kind, required) from error

    async def _apply_in_turn(self, manifests: Sequence[Manifest], job: Observed, made: _Made) -> None:
        for manifest in manifests:
            if is_shared(manifest):
                made = remembered(self._shared, job.namespace, _Made(uid="", attempt=None), _JOBS_REMEMBERED)
            key, digest = _key(manifest), _digest(manifest)
            if made.digests.get(key) != digest:
                made.uids[key] = await self._create_or_apply(manifest, job, made.uids.get(key))
                made.digests[key] = digest

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

    async def _create_once(self, manifest: Manifest, job: Observed, made: _Made) -> None:
        """Create the object if the job does not have it yet."""
        if _key(manifest) in made.digests:
            return
        try:
            await self._client.create(resource_of(manifest), manifest, manifest["metadata"]["namespace"])
        except AlreadyExists:
            if manifest["kind"] != SECRETS.kind:  # its name has the uid of the job
                await self._uid_if_owned(manifest, job)
        made.digests[_key(manifest)] = b""

    async def _create_gone(self, manifests: Sequence[Manifest]) -> None:
        for manifest in manifests:
            await self._create_if_gone(manifest)

    async def _create_if_gone(self, manifest: Manifest) -> None:
        resource, (kind, name), namespace = resource_of(manifest), _key(manifest), manifest["metadata"]["namespace"]
        if kind != SECRETS.kind:  # which the operator may not read
            with suppress(NotFound):
                await self._client.get_metadata(resource, name, namespace)
                return
        with suppress(AlreadyExists):
            await self._client.create(resource, manifest, namespace)
            _log.warning("created again, because it was deleted while the job runs", kind=kind, name=name)

    async def _uid_if_owned(self, manifest: Manifest, job: Observed) -> str:
        kind, name = _key(manifest)
        try:
            metadata = await self._client.get_metadata(resource_of(manifest), name, manifest["metadata"]["namespace"])
        except NotFound as error:
            raise Conflict(f"{kind} {name} was deleted in the meantime") from error
        return require_shared(metadata, kind) if is_shared(manifest) else require_owned(metadata, kind, job)

    async def _create_pod(self, manifest: Manifest, job: Observed) -> None:
        self._saw(await self._created_pod(manifest, job))

    async def _created_pod(self, manifest: Manifest, job: Observed) -> Object:
        """The pod of this name, created or found. Raises NameTaken if it is not the job's."""
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
        if "deletionTimestamp" in pod["metadata"] and any(belonged_to(owner, job) for owner in owners):
            raise LeftBehind(PODS.kind, name)
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

    async def delete_workload(self, name: str, namespace: str) -> None:
        """Delete the Workload of Kueue, if it exists."""
        with suppress(NotFound):
            await self._client.delete(self.workloads, name, namespace)


def _is_pod(manifest: Manifest) -> bool:
    return bool(manifest["kind"] == PODS.kind)


def _in_turn(manifests: Sequence[Manifest]) -> list[list[Manifest]]:
    """Objects that can be written at the same time. The API server refuses a RoleBinding without its Role."""
    bindings = [manifest for manifest in manifests if manifest["kind"] == "RoleBinding"]
    return [
        [manifest, *bindings] if manifest["kind"] == "Role" else [manifest]
        for manifest in manifests
        if manifest not in bindings
    ]


def _attempt(manifest: Manifest) -> str:
    return str(manifest["metadata"]["labels"][labels.ATTEMPT])


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _digest(manifest: Manifest) -> bytes:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).digest()


def _uid(obj: Object) -> str:
    return str(obj["metadata"].get("uid", ""))
