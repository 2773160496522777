"""Cached form of an RLJob, and its parsing for each reconcile."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pydantic

from rljob_api.job import RLJob
from rljob_api.manifest import dotted
from rljob_api.manifest.problems import ProblemText, checked
from rljob_api.manifest.yaml_document import Document
from rljob_api.metadata import Metadata
from rljob_api.status import RLJobStatus
from rljob_operator import labels
from rljob_operator.kube.decoding import MAX_LEVELS, NESTED_TOO_DEEPLY
from rljob_operator.kube.resources import Object
from rljob_operator.observe.packed import pack, unpack
from rljob_operator.observe.pod_facts import moment

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


@dataclass(frozen=True, slots=True)
class JobFact:
    """One RLJob. Its JSON is parsed for each reconcile; parsed, it would be thirty times as large."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    generation: int
    created_at: datetime
    deleting: bool
    finalizers: tuple[str, ...]
    operator: str
    """Installation that reconciles the job, from its annotation; empty if none does yet."""
    phase: str
    """As in kubectl get; Pending if there is none yet."""
    placed: bool
    """Its pods are scheduled, or no longer needed."""
    runs: bool
    """Its pods hold nodes, or it recovers from a failure."""
    packed_text: bytes = field(repr=False)

    @property
    def text(self) -> bytes:
        """The object as JSON, without managed fields."""
        return unpack(self.packed_text)

    @property
    def has_finalizer(self) -> bool:
        return labels.FINALIZER in self.finalizers

    def status(self) -> Object:
        """The stored status; empty if there is none."""
        status: Object = json.loads(self.text).get("status") or {}
        return status


def job_fact(obj: Object) -> JobFact:
    metadata = {name: value for name, value in obj["metadata"].items() if name in _METADATA}
    phase, scheduled = _phase_and_scheduled(obj.get("status"))
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
        phase=phase,
        placed=scheduled or phase in ("Complete", "Failed", "Suspended", "Invalid"),
        runs=scheduled or phase in ("Running", "Recovering"),
        packed_text=pack(json.dumps(obj | {"metadata": metadata}, separators=(",", ":")).encode()),
    )


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
        return ParsedJob(_parsed(text))
    except pydantic.ValidationError:
        without_status: Object = json.loads(text)
        status = _parsed_status(without_status.pop("status", None))
    try:
        return ParsedJob(_parsed(json.dumps(without_status)))
    except pydantic.ValidationError:
        return ParsedJob(None, _problem(without_status), status)


def _parsed(text: bytes | str) -> RLJob:
    return RLJob.model_validate_json(text, by_alias=True, by_name=False)


def _parsed_status(status: Object | None) -> RLJobStatus | None:
    try:
        return RLJobStatus.model_validate_json(json.dumps(status or {}), by_alias=True, by_name=False)
    except pydantic.ValidationError:
        return None


def _problem(stored: Object) -> str:
    text = ProblemText(Document(stored, {}))
    sentences = [f"{dotted(error['loc'])}: {text.of(error)}" for error in checked(stored).errors[:_MAX_ERRORS]]
    return "; ".join(sentences)[:_MAX_PROBLEM] or "cannot parse the object"
