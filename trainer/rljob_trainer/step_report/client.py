"""The one object in the cluster that the trainer may write: its job's StepReport, by server-side apply."""

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
        """Make `report` all that this field manager says. Raises `NoAnswer`."""
        self._server.apply(self._path, encoded(report), FIELD_MANAGER)

    def read(self) -> StepReport | None:
        """The report as it is; None where it is not one. Raises `NoAnswer` where it cannot be read."""
        found = self._server.get(self._path)
        with suppress(ValidationError):
            return StepReport.model_validate_json(found)
        return None


def encoded(report: StepReport) -> bytes:
    """The body of an apply: JSON, which is YAML. Defaults are left out, but for those that name the type."""
    fields = report.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    named = {"apiVersion": report.api_version, "kind": report.kind, **fields}
    return json.dumps(named, separators=(",", ":")).encode()
