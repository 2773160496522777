"""Cached forms of RLJobs, StepReports and MemoryProfiles, and their parsing for each reconcile."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pydantic
from pydantic_core import to_json

from rljob_api.bounds import within_bounds
from rljob_api.job import MANAGED_BY_OPERATOR, RLJob
from rljob_api.manifest import dotted
from rljob_api.manifest.problems import ProblemText, checked
from rljob_api.manifest.yaml_document import Document
from rljob_api.metadata import Metadata
from rljob_api.status import RLJobStatus
from rljob_api.step_report import StepReportStatus
from rljob_operator import labels
from rljob_operator.kube.decoding import MAX_LEVELS, NESTED_TOO_DEEPLY
from rljob_operator.kube.resources import Object
from rljob_operator.metrics import STEP_REPORTS_REFUSED
from rljob_operator.observe.pod_facts import moment
from rljob_operator.reconcile.observed import JobMetadata, StoredProfile

Model = TypeVar("Model", bound=pydantic.BaseModel)

_MAX_PROBLEM = 1024
_MAX_OPERATOR = 253 + 1 + 253
_MAX_ERRORS = 20
"""More do not fit into _MAX_PROBLEM characters. A job can have 60,000 unknown fields, whose texts take 0.1 ms each."""
_METADATA = frozenset(field.alias or name for name, field in Metadata.model_fields.items()) - {"managedFields"}
"""Metadata that is kept; later versions of Kubernetes may add more."""
_PLACEHOLDER = NESTED_TOO_DEEPLY.encode()
_NESTED_TOO_DEEPLY = (
    f"expected fewer than {MAX_LEVELS} levels of nesting, found more; remove the nested objects, which are probably in "
    "a template or in engineArgs"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFact(JobMetadata):
    """One RLJob. Its JSON is parsed for each reconcile; parsed, it would be thirty times as large."""

    phase: str
    """Phase as in kubectl get; Pending if there is none yet."""
    placed: bool
    """Its pods are scheduled, or no longer needed, or another controller's concern."""
    runs: bool
    """Its pods hold nodes, or it recovers from a failure."""
    packed_text: bytes = field(repr=False)

    @property
    def text(self) -> bytes:
        """The object as JSON, without managed fields."""
        return unpack(self.packed_text)


def job_fact(obj: Object) -> JobFact:
    metadata = {name: value for name, value in obj["metadata"].items() if name in _METADATA}
    phase, scheduled = _phase_and_scheduled(obj.get("status"))
    delegated = _is_delegated(obj.get("spec"))
    return JobFact(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        generation=int(metadata.get("generation") or 1),
        created_at=moment(metadata["creationTimestamp"]),
        deleting="deletionTimestamp" in metadata,
        finalizers=tuple(metadata.get("finalizers") or ()),
        operator=(metadata.get("annotations") or {}).get(labels.OPERATOR, "")[:_MAX_OPERATOR],
        delegated=delegated,
        phase=phase,
        placed=delegated or scheduled or phase in ("Complete", "Failed", "Suspended", "Invalid"),
        runs=not delegated and (scheduled or phase in ("Running", "Recovering")),
        packed_text=pack(json.dumps(obj | {"metadata": metadata}, separators=(",", ":")).encode()),
    )


def _is_delegated(spec: Any) -> bool:
    """Read from the stored spec, because another controller's job need not be valid here."""
    manager = spec.get("managedBy") if isinstance(spec, dict) else None
    return isinstance(manager, str) and manager not in ("", MANAGED_BY_OPERATOR)


def _phase_and_scheduled(status: Any) -> tuple[str, bool]:
    """The phase, and whether the pods are scheduled; defaults for a status of another form."""
    try:
        phase = str((status.get("display") or {}).get("phase") or "Pending")
        return phase, any(c["type"] == "Scheduled" and c["status"] == "True" for c in status.get("conditions") or ())
    except (TypeError, KeyError, AttributeError):
        return "Pending", False


@dataclass(frozen=True, slots=True)
class ParsedJob:
    """The job, or the error `problem` and the status, if that can be parsed.

    A status that cannot be parsed counts as absent, because it can be derived again.
    """

    job: RLJob | None
    problem: str | None = None
    status: RLJobStatus | None = None


def parse_job(text: bytes) -> ParsedJob:
    if _PLACEHOLDER in text:
        return ParsedJob(None, _NESTED_TOO_DEEPLY, _parsed_status(json.loads(text).get("status")))
    try:
        return ParsedJob(_parsed(RLJob, text))
    except pydantic.ValidationError:
        without_status: Object = json.loads(text)
        status = _parsed_status(without_status.pop("status", None))
    try:
        return ParsedJob(_parsed(RLJob, json.dumps(without_status)))
    except pydantic.ValidationError:
        return ParsedJob(None, _problem(without_status), status)


def raw_status(text: bytes) -> Object:
    """The status in the JSON of a job; empty if there is none."""
    status: Object = json.loads(text).get("status") or {}
    return status


def _parsed(model: type[Model], text: bytes | str) -> Model:
    return model.model_validate_json(text, by_alias=True, by_name=False)


def _parsed_status(status: Object | None) -> RLJobStatus | None:
    try:
        return _parsed(RLJobStatus, json.dumps(status or {}))
    except pydantic.ValidationError:
        return None


def _problem(stored: Object) -> str:
    text = ProblemText(Document(stored, {}))
    messages = [f"{dotted(error['loc'])}: {text.of(error)}" for error in checked(stored).errors[:_MAX_ERRORS]]
    return "; ".join(messages)[:_MAX_PROBLEM] or "cannot parse the object"


# --- StepReports ---


MAX_STEP_REPORT_BYTES = 256 << 10
"""Twice the content of the largest job: 256 processes, and 20 changes of the plan."""

_MAX_REPORT_PROBLEM = 1024
_TOO_LARGE = f"expected at most {MAX_STEP_REPORT_BYTES >> 10} KiB, found more; the content is not read"


@dataclass(frozen=True, slots=True)
class StepReportFact:
    """One StepReport."""

    resource_version: str
    owners: tuple[str, ...]
    """uids of its owners."""
    packed_text: bytes = b""
    """The JSON of its status, packed; empty if it has none, or one that is too large."""
    too_large: bool = False

    def content(self, job_uid: str) -> tuple[StepReportStatus | None, str | None]:
        """The content, or the error in it; neither if it is empty, or the report is not that of the job."""
        if job_uid not in self.owners:
            return None, None
        if self.too_large:
            return None, _TOO_LARGE
        return parse_step_report(unpack(self.packed_text)) if self.packed_text else (None, None)


def step_report_fact(obj: Object) -> StepReportFact:
    version = str(obj["metadata"].get("resourceVersion", ""))
    owners = tuple(str(owner.get("uid")) for owner in obj["metadata"].get("ownerReferences") or ())
    status = obj.get("status")
    text = to_json(status) if status else b""
    if len(text) > MAX_STEP_REPORT_BYTES:
        STEP_REPORTS_REFUSED.inc()
        return StepReportFact(version, owners, too_large=True)
    return StepReportFact(version, owners, pack(text) if text else b"")


def parse_step_report(text: bytes) -> tuple[StepReportStatus | None, str | None]:
    """The content, or the error in it. Content beyond the bounds of the API, which an older CRD has let through, is
    brought within them."""
    try:
        return _parsed(StepReportStatus, text), None
    except pydantic.ValidationError:
        pass
    try:
        return _parsed(StepReportStatus, to_json(within_bounds(json.loads(text), StepReportStatus))), None
    except pydantic.ValidationError as error:
        first: dict[str, Any] = dict(error.errors(include_url=False)[0])
        return None, f"{dotted(first['loc'])}: {first['msg']}"[:_MAX_REPORT_PROBLEM]


# --- MemoryProfiles ---


def stored_profile(obj: Object) -> StoredProfile:
    metadata = {name: obj["metadata"][name] for name in ("name", "namespace")}
    return StoredProfile(
        namespace=metadata["namespace"],
        last_used_at=moment(obj["status"]["lastUsedTime"]),
        text=to_json(obj | {"metadata": metadata}),
    )


# --- Compressed texts ---


_LEVEL = 1
"""Fastest: 60 µs, and 1.6 instead of 4.2 kB for a running job, which is 25 MB for 10,000 jobs; a tenth of the size for
a StepReport of many ranks."""


def pack(text: bytes) -> bytes:
    """The compressed text. Equal texts have equal packed forms."""
    return zlib.compress(text, _LEVEL)


def unpack(packed: bytes) -> bytes:
    return zlib.decompress(packed)
