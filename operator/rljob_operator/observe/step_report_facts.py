"""Cached form of a StepReport, and its parsing for each reconcile. Pods write its content: nothing of it is trusted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pydantic
from pydantic_core import to_json

from rljob_api.bounds import within_bounds
from rljob_api.manifest import dotted
from rljob_api.step_report import StepReportStatus
from rljob_operator.kube.resources import Object
from rljob_operator.metrics import STEP_REPORTS_REFUSED
from rljob_operator.observe.packed import pack, unpack

MAX_STEP_REPORT_BYTES = 256 << 10
"""Twice the content of the largest job: 256 processes, and 20 changes of the plan."""

_MAX_PROBLEM = 1024
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
        return _parsed(text), None
    except pydantic.ValidationError:
        pass
    try:
        return _parsed(to_json(within_bounds(json.loads(text), StepReportStatus))), None
    except pydantic.ValidationError as error:
        first: dict[str, Any] = dict(error.errors(include_url=False)[0])
        return None, f"{dotted(first['loc'])}: {first['msg']}"[:_MAX_PROBLEM]


def _parsed(text: bytes) -> StepReportStatus:
    return StepReportStatus.model_validate_json(text, by_alias=True, by_name=False)
