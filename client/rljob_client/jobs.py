"""The Python SDK: RLJobs of a cluster, as `rljob_client.RLJobClient`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from pydantic import BaseModel, ValidationError

from rljob_api.conditions import ConditionType
from rljob_api.job import RLJob, RLJobSpec, grown_spec
from rljob_api.manifest import only_job
from rljob_api.metadata import API_VERSION, INDEX_LABEL, JOB_NAME_LABEL, ROLE_LABEL
from rljob_api.plan_change import Role
from rljob_api.status import Condition, RLJobStatus
from rljob_api.step_report import StepReport, StepReportStatus
from rljob_api.topology import pod_of_process
from rljob_client.api_errors import KubernetesError, ObjectMissing
from rljob_client.api_server import ApiServer, Object
from rljob_client.errors import RunError
from rljob_client.fetch_command import fetch_files
from rljob_client.run_directory.ledger import read_ledger
from rljob_client.run_directory.records import StepRecord, step_records

Model = TypeVar("Model", bound=BaseModel)

_NOT_REPORTED = ("checkpoints", "journal", "model")
"""Large directories of a run that its report does not read."""


class JobEnded(RunError):
    """The job has ended, and what was waited for cannot happen. The message has the job's own explanation."""


class JobFailed(JobEnded):
    """The job has failed, or cannot continue without a person."""


class JobTimeout(RunError, TimeoutError):
    """The time given to `Job.wait` has passed."""


class RLJobClient:
    """RLJobs in one namespace of a cluster.

    `namespace` and `context` (of the kubeconfig): None for those that kubectl would use. In a pod without a kubeconfig,
    its service account and namespace. Requests raise subclasses of `KubernetesError`, each with one sentence.
    """

    def __init__(self, namespace: str | None = None, context: str | None = None, kubeconfig: str | None = None) -> None:
        self.api = ApiServer(context, namespace, kubeconfig)
        self.namespace = self.api.namespace

    def create(self, job: RLJob | Mapping[str, Any] | str | Path, *, dry_run: bool = False) -> Job:
        """Create a job from a manifest: a path, the object in YAML's types, or an RLJob.

        `dry_run`: the API server checks it and stores nothing. Raises ManifestError, with lines, for an invalid file;
        ObjectRefused, in the words of the schema's rules, if the API server refuses it; ObjectExists if the name is
        taken. Warnings of the API server, such as a prediction that the job does not fit, become Python warnings.
        """
        body = {"apiVersion": API_VERSION, "kind": "RLJob", **_manifest(job)}
        api = self.api.at(body.get("metadata", {}).get("namespace") or self.namespace)
        return Job(api, api.create("rljobs", body, dry_run=dry_run))

    def get(self, name: str) -> Job:
        """The job. Raises ObjectMissing."""
        return Job(self.api, self.api.get("rljobs", name))

    def watch(self, *, timeout: float | None = None) -> Iterator[Job]:
        """All jobs of the namespace, then each of them whenever it changes or is deleted, for `timeout` seconds."""
        for kind, stored in self.api.changes("rljobs", seconds=timeout):
            yield Job(self.api, stored, is_deleted=kind == "DELETED")

    def list(self, *, all_namespaces: bool = False) -> Sequence[Job]:
        """The jobs of the namespace, or of all."""
        api = self.api.at("") if all_namespaces else self.api
        return [Job(api, stored) for stored in api.list("rljobs")]


class Job:
    """An RLJob of the cluster. Its state is that of the latest request; `refresh` makes a new one."""

    def __init__(self, api: ApiServer, stored: Object, *, is_deleted: bool = False) -> None:
        self.name = str(stored["metadata"]["name"])
        self.namespace = str(stored["metadata"]["namespace"])
        self.stored = stored
        """The object as the API server sent it."""
        self.is_deleted = is_deleted
        self.reader_image: str | None = None
        """Image with tar and sleep of the pod that reads the volume; None: that of the job's pods, if it has any."""
        self._api = api.at(self.namespace)

    def __repr__(self) -> str:
        step = self.status.display.step if self.status.display else ""
        return f"<Job {self.namespace}/{self.name}: {' '.join(filter(None, (self.phase, step)))}>"

    # --- state ---

    @property
    def spec(self) -> RLJobSpec:
        """The spec, with all defaults."""
        return _parsed(RLJobSpec, self.stored["spec"])

    @property
    def status(self) -> RLJobStatus:
        """The status; without values until the operator has seen the job."""
        return _parsed(RLJobStatus, self.stored.get("status") or {})

    @property
    def phase(self) -> str:
        """Pending, Invalid, Suspended, Running, Recovering, Complete or Failed."""
        ready = self.condition(ConditionType.READY)
        return ready.reason if ready else "Pending"

    @property
    def explanation(self) -> str:
        """The operator's explanation of the phase."""
        ready = self.condition(ConditionType.READY)
        return ready.message if ready else "the operator has not seen the job yet"

    def condition(self, type_: str) -> Condition | None:
        """The condition of this type; None if the operator has not set it."""
        return next((found for found in self.status.conditions if found.type == type_), None)

    def is_true(self, type_: str) -> bool:
        """True if the condition holds for the present spec. A condition of an earlier spec does not count."""
        found, generation = self.condition(type_), self.stored["metadata"]["generation"]
        return found is not None and found.status == "True" and (self.status.observed_generation or 0) >= generation

    def refresh(self) -> Job:
        """Request the present state, and return the job. Raises ObjectMissing if it was deleted."""
        self.stored = self._api.get("rljobs", self.name)
        return self

    def watch(self, *, timeout: float | None = None) -> Iterator[Job]:
        """This job now, and again whenever it changes, until it is deleted or `timeout` seconds have passed."""
        for kind, stored in self._api.changes("rljobs", name=self.name, known=[self.stored], seconds=timeout):
            self.stored, self.is_deleted = stored, kind == "DELETED"
            yield self
            if self.is_deleted:
                return

    def wait(
        self,
        until: str = "Complete",
        *,
        timeout: float | None = None,
        on_progress: Callable[[Job], object] = lambda job: None,
    ) -> Job:
        """Wait until the condition `until` is true, such as Running, or the job is Deleted, and return the job.

        `on_progress` is called with the job now and at each change. Raises JobFailed, with the job's explanation, if it
        fails or cannot continue without a person; JobEnded if it completes before; ObjectMissing if it is deleted;
        JobTimeout after `timeout` seconds.
        """
        if until != "Deleted" and until not in list(ConditionType):
            raise ValueError(f"expected Deleted or one of {', '.join(ConditionType)}, found {until!r}")
        for _ in self.watch(timeout=timeout):
            on_progress(self)
            if self._has_reached(until):
                return self
        raise JobTimeout(f"expected {until} of {self.name} within {timeout:g} s, found {self._state}")

    def _has_reached(self, until: str) -> bool:
        if self.is_deleted and until != "Deleted":
            raise ObjectMissing(f"expected {until} of {self.name}, found that it was deleted")
        if until == "Deleted" or self.is_true(until):
            return self.is_deleted or until != "Deleted"
        for type_, what in ((ConditionType.FAILED, "has failed"), (ConditionType.STALLED, "cannot continue")):
            if self.is_true(type_) and (found := self.condition(type_)):
                raise JobFailed(f"{self.name} {what} ({found.reason}): {found.message}")
        if self.is_true(ConditionType.COMPLETE):
            if until == ConditionType.RUNNING:  # it has run, between two looks
                return True
            raise JobEnded(f"expected {until} of {self.name}, found {self._state}")
        return False

    @property
    def _state(self) -> str:
        return f"{self.phase}: {self.explanation}"

    # --- changes ---

    def patch(self, spec: Mapping[str, Any]) -> Job:
        """Change fields of the spec by a JSON merge patch, in the manifest's spelling, and return the job.

        For example `job.patch({"algorithm": {"steps": 200}})`. Raises ObjectRefused for a field that cannot change.
        """
        self.stored = self._api.merge("rljobs", self.name, {"spec": dict(spec)})
        return self

    def suspend(self) -> Job:
        """Have the job save a checkpoint and its pods terminate."""
        return self.patch({"suspend": True})

    def resume(self) -> Job:
        """Resume a suspended job."""
        return self.patch({"suspend": False})

    def retry(self) -> Job:
        """Resume a failed job without another change."""
        return self.patch({"retry": self.refresh().spec.retry + 1})

    def delete(self) -> None:
        """Delete the job, its pods and, unless `checkpoint.retain` keeps it, the volume with checkpoints and model."""
        self._api.delete("rljobs", self.name)

    # --- what its pods do ---

    def pods(self) -> Sequence[Object]:
        """Its pods by name, as manifests."""
        return self._api.list("pods", labelSelector=f"{JOB_NAME_LABEL}={self.name}")

    def events(self) -> Sequence[Object]:
        """Events about the job, as manifests, oldest first. The cluster keeps them for an hour by default."""
        selector = f"involvedObject.kind=RLJob,involvedObject.name={self.name}"
        found = self._api.list("events", fieldSelector=selector)
        return sorted(found, key=lambda event: event.get("eventTime") or event["metadata"]["creationTimestamp"])

    def report_status(self) -> StepReportStatus | None:
        """The progress and the memory of each process, as the job's pods reported it; None before the first report."""
        found = self._api.find("stepreports", self.name)
        return _parsed(StepReport, found).status if found else None

    @overload
    def logs(self, role: Role = ..., rank: int = ..., *, follow: Literal[False] = ..., previous: bool = ...) -> str: ...

    @overload
    def logs(
        self, role: Role = ..., rank: int = ..., *, follow: Literal[True], previous: bool = ...
    ) -> Iterator[str]: ...

    def logs(
        self, role: Role = "controller", rank: int = 0, *, follow: bool = False, previous: bool = False
    ) -> str | Iterator[str]:
        """The log of the pod that runs this process. `follow`: its lines as they are written, until the pod ends.

        `previous`: the log of the container before its restart in place. With topology Colocated, the engines are in
        the policy's pods. Raises ObjectMissing if there is no such pod.
        """
        log = self._api.log(self._pod_name(role, rank), container="rljob", previous=previous, follow=follow)
        lines = (line.decode(errors="replace") for line in log)
        return lines if follow else "".join(lines)

    def _pod_name(self, role: Role, rank: int) -> str:
        wanted, index = pod_of_process(grown_spec(self.spec, self.status.plan), role, rank)
        pods = {str(pod["metadata"]["name"]): pod["metadata"]["labels"] for pod in self.pods()}
        for name, labels in pods.items():
            if (labels.get(ROLE_LABEL), labels.get(INDEX_LABEL)) == (wanted, str(index)):
                return name
        found = ", ".join(pods) or f"none, because it is {self._state}"
        raise ObjectMissing(f"expected a pod of {self.name} with {role} {rank}, found {found}")

    # --- files of the run ---

    def metrics(self) -> Sequence[StepRecord]:
        """The committed steps, from the run's ledger, which a small pod reads from the job's volume."""
        with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
            return step_records(read_ledger(self.fetch("ledger.jsonl", Path(folder, "ledger.jsonl"))).records)

    def model(self, path: str | Path) -> Path:
        """Copy the trained model, in Hugging Face format, to the new directory `path`. Raises BadInput if it is
        damaged."""
        return self.fetch("model", path)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the report of the run, one HTML file, to `path`."""
        from rljob_client.report import write_report  # plotly takes a while

        with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
            return write_report(self.fetch(".", Path(folder, self.name), without=_NOT_REPORTED), Path(path))

    def fetch(self, files: str, path: str | Path, *, without: Sequence[str] = ()) -> Path:
        """Copy a file or directory of the run (`.`: all of it), as `rljob fetch`, and return its path here."""
        fetch_files(self._api, self.name, files, Path(path), image=self.reader_image, without=without)
        return Path(path)


def _manifest(job: RLJob | Mapping[str, Any] | str | Path) -> Object:
    """The object to send. Raises ManifestError for an invalid file."""
    if isinstance(job, RLJob):
        return job.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"status"})
    if isinstance(job, Mapping):
        return dict(job)
    document = only_job(Path(job))
    document.load()
    return dict(document.document.data)


def _parsed(model: type[Model], value: Object) -> Model:
    """The value, without fields that this version does not know. Raises KubernetesError for an invalid one."""
    try:
        return model.model_validate(value, by_alias=True, by_name=False, extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        found = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        expected = f"expected a {model.__name__} of this version, found {found}"
        raise KubernetesError(f"{expected}; install the rljob-client of the cluster's CRDs") from None
