"""Writes the StepReport, the only object in the cluster that the trainer may write, by server-side apply."""

from __future__ import annotations

import json
from contextlib import suppress

from pydantic import ValidationError

from rljob_api.names import API_VERSION
from rljob_api.step_report import StepReport
from rljob_trainer.step_report.api_server import ApiServer

FIELD_MANAGER = "rljob-trainer"


class StepReportClient:
    def __init__(self, server: ApiServer, namespace: str, name: str) -> None:
        self._server = server
        self._path = f"/apis/{API_VERSION}/namespaces/{namespace}/stepreports/{name}"

    def apply(self, report: StepReport) -> None:
        """Apply `report` with all fields of this field manager. Raises `NoAnswer`."""
        self._server.apply(self._path, encoded(report), FIELD_MANAGER)

    def read(self) -> StepReport | None:
        """The stored report; None if it is not valid. Raises `NoAnswer` if it cannot be read."""
        found = self._server.get(self._path)
        with suppress(ValidationError):
            return StepReport.model_validate_json(found)
        return None


def encoded(report: StepReport) -> bytes:
    """The body of an apply: JSON, which is YAML. Defaults are left out, except those that name the type."""
    fields = report.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    named = {"apiVersion": report.api_version, "kind": report.kind, **fields}
    return json.dumps(named, separators=(",", ":")).encode()
