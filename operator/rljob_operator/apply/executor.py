"""Executes decisions: writes in the order of the fields of Desired, up to the first field of which a write fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import structlog

from rljob_api.bounds import within_bounds
from rljob_api.conditions import ConditionType
from rljob_api.quantity import byte_quantity
from rljob_api.status import RLJobStatus
from rljob_api.step_report import ExitDecision
from rljob_operator import labels
from rljob_operator.apply.event_recorder import EventRecorder
from rljob_operator.apply.object_writer import LARGEST_WAVE, ObjectWriter, in_waves
from rljob_operator.events import EventNote, EventReason
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound
from rljob_operator.kube.resources import MEMORY_PROFILES, PODS, RLJOBS, STEP_REPORTS, WORKLOADS, Object
from rljob_operator.kube.watch import Key
from rljob_operator.objects.attempt import CONTAINER, Manifest
from rljob_operator.reconcile.desired import Desired, PodDeletion, PodResize
from rljob_operator.reconcile.observed import ObservedJob

_log = structlog.get_logger(__name__)


class JobGone(Exception):
    """The job was deleted after it was last observed."""


class Executor:
    """Executes decisions. `saw` is called with each object that a write returned."""

    def __init__(self, client: ApiClient, recorder: EventRecorder, saw: Callable[[Object], None]) -> None:
        self.workloads = WORKLOADS
        """Kueue's Workloads, in the version that the API server serves."""
        self._client = client
        self._recorder = recorder
        self._saw = saw
        self._objects = ObjectWriter(client, saw)
        self._decisions: dict[Key, tuple[str, ExitDecision]] = {}
        self._refused_resizes: dict[Key, set[PodResize]] = {}

    def forget(self, job: Key) -> None:
        """Drop the records of a job that is gone."""
        self._decisions.pop(job, None)
        self._refused_resizes.pop(job, None)

    async def execute(self, desired: Desired, job: ObservedJob) -> None:
        """Execute all writes of `desired`.

        Raises Conflict if the job has changed since, JobGone, NameTaken, MissingObject, ForeignObject, LeftBehind, and
        the errors of `kube.errors`.
        """
        version = job.resource_version
        claimed = {} if desired.claim is None else {"annotations": {labels.OPERATOR: desired.claim}}
        added = {"finalizers": [*job.finalizers, labels.FINALIZER]} if desired.finalizer is True else {}
        if claimed or added:
            version = await self._patch_metadata(job, version, {**claimed, **added})
        await in_waves([partial(self._resize_pod, resize, job) for resize in desired.resize_pods], LARGEST_WAVE)
        refusal = await self._objects.make(desired, job)
        await in_waves([partial(self._delete_pod, deletion, job) for deletion in desired.delete_pods], LARGEST_WAVE)
        for workload in desired.delete_workloads:
            await self.delete_workload(workload, job.namespace)
        if desired.decision is not None:
            await self._write_decision(desired.decision, job)
        if desired.profile is not None:
            await self._write_profile(desired.profile, desired.delete_profiles)
        if desired.delete_job:
            await self._delete_job(job)
            return
        if desired.status is not None:
            status_patch = merge_patch(job.raw_status, status_object(desired.status))
            version = await self._write_status(job, version, status_patch)
        for note in desired.events:
            self._recorder.record(job, note)
        if desired.finalizer is False:
            left = [finalizer for finalizer in job.finalizers if finalizer != labels.FINALIZER]
            await self._patch_metadata(job, version, {"finalizers": left})
        if refusal is not None:
            raise refusal
        # Last: a refusal holds up nothing else.
        await self._objects.verify(desired.verify)

    async def report(self, note: EventNote, job: ObservedJob) -> None:
        """Write the report into the condition Failed, which stays False, if it is not there already."""
        content = {"reason": note.reason, "message": note.message}
        if patch := condition_patch(job.raw_status, ConditionType.FAILED, content, job.generation):
            await self._write_status(job, job.resource_version, patch)
            self._recorder.record(job, note)

    # --- the job itself: each write names the resourceVersion that it was made for ---

    async def _patch_metadata(self, job: ObservedJob, version: str, metadata: Object) -> str:
        return await self._patch_job(job, {"metadata": {"resourceVersion": version, **metadata}})

    async def _write_status(self, job: ObservedJob, version: str, status_patch: Object) -> str:
        if not status_patch:
            return version
        patch = {"metadata": {"resourceVersion": version}, "status": status_patch}
        return await self._patch_job(job, patch, "status")

    async def _patch_job(self, job: ObservedJob, patch: Object, subresource: str | None = None) -> str:
        try:
            written = await self._client.patch(RLJOBS, job.name, patch, job.namespace, subresource)
        except NotFound as error:
            raise JobGone(error.message) from error
        self._saw(written)
        return str(written["metadata"]["resourceVersion"])

    async def _delete_job(self, job: ObservedJob) -> None:
        try:
            self._saw(await self._client.delete(RLJOBS, job.name, job.namespace, uid=job.uid))
        except NotFound as error:
            raise JobGone(error.message) from error

    async def _write_decision(self, decision: ExitDecision, job: ObservedJob) -> None:
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

    async def _write_profile(self, profile: Manifest, surplus: tuple[str, ...]) -> None:
        """Write the MemoryProfile, and delete others. A refusal holds up nothing: the job does not depend on it."""
        name, namespace = profile["metadata"]["name"], profile["metadata"]["namespace"]
        try:
            self._saw(await self._client.apply(profile, None))
            for other in surplus:
                with suppress(NotFound):
                    await self._client.delete(MEMORY_PROFILES, other, namespace)
        except ApiError as error:
            _log.warning("memory profile not written", profile=name, error=error.message)

    # --- pods and Workloads ---

    async def _resize_pod(self, resize: PodResize, job: ObservedJob) -> None:
        """Raise the limit, unless that was refused before, or the pod is gone or replaced by another of its name."""
        refused = self._refused_resizes.setdefault((job.namespace, job.name), set())
        if resize in refused:
            return
        memory = {"memory": byte_quantity(resize.limit_bytes)}
        resources = {"limits": memory} | ({"requests": memory} if resize.with_request else {})
        patch = {"metadata": {"uid": resize.uid}, "spec": {"containers": [{"name": CONTAINER, "resources": resources}]}}
        try:
            self._saw(await self._client.resize(resize.name, patch, job.namespace))
        except Conflict:
            return
        except (Forbidden, Invalid, NotFound) as error:
            refused.add(resize)
            if f'"{resize.name}" not found' not in error.message:
                message = (
                    f"pod {resize.name} keeps its memory limit until it is replaced, instead of {memory['memory']}: "
                    f"{error.message}"
                )
                self._recorder.record(job, EventNote("Warning", EventReason.POD_NOT_RESIZED.value, message))

    async def _delete_pod(self, deletion: PodDeletion, job: ObservedJob) -> None:
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


# --- Patches of the status ---


def status_object(status: RLJobStatus) -> Object:
    """The status in its stored form, which the API server accepts."""
    stored: Object = within_bounds(status.model_dump(mode="json", by_alias=True, exclude_none=True), RLJobStatus)
    return stored


def merge_patch(before: Object, after: Object) -> Object:
    """The JSON merge patch (RFC 7386) that turns `before` into `after`; empty if they are equal."""
    patch: Object = {name: None for name in before if name not in after}
    for name, value in after.items():
        known: Any = before.get(name)
        if isinstance(known, dict) and isinstance(value, dict):
            if known != value:
                patch[name] = merge_patch(known, value)
        elif known != value or name not in before:
            patch[name] = value
    return patch


def condition_patch(status: Object, type_: str, condition: Object, generation: int) -> Object:
    """The patch that sets a condition to False; empty if it has this content already, or is True."""
    stored = [known for known in status.get("conditions") or () if isinstance(known, dict)]
    before = next((known for known in stored if known.get("type") == type_), {})
    if before.get("status") == "True" or all(before.get(name) == value for name, value in condition.items()):
        return {}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    changed = {
        "type": type_,
        "status": "False",
        "lastTransitionTime": before.get("lastTransitionTime", now),
        "observedGeneration": generation,
    } | condition
    return {"conditions": [*(known for known in stored if known is not before), changed]}
