"""Writes the status of the StepReport, all that the trainer may write in the cluster, by server-side apply."""

from __future__ import annotations

import json
from contextlib import suppress

from pydantic import ValidationError

from rljob_api.metadata import API_VERSION, Metadata
from rljob_api.step_report import StepReport, StepReportStatus
from rljob_trainer.step_report.api_server import ApiServer

FIELD_MANAGER = "rljob-trainer"


class StepReportClient:
    def __init__(self, server: ApiServer, namespace: str, name: str) -> None:
        self._server = server
        self._name = name
        self._path = f"/apis/{API_VERSION}/namespaces/{namespace}/stepreports/{name}/status"

    def apply(self, report: StepReportStatus) -> None:
        """Apply `report` with all fields of this field manager. Raises `NoAnswer`."""
        self._server.apply(self._path, encoded(self._name, report), FIELD_MANAGER)

    def read(self) -> StepReportStatus | None:
        """The stored report; None if there is none or it is not valid. Raises `NoAnswer` if it cannot be read.

        The answer to an empty patch, which changes and stores nothing: the right to `get` would be one more.
        """
        found = self._server.merge(self._path, b"{}")
        with suppress(ValidationError):
            return StepReport.model_validate_json(found).status
        return None


def encoded(name: str, report: StepReportStatus) -> bytes:
    """The body of an apply: JSON, which is YAML. Defaults are left out, except those that name the type."""
    document = StepReport(metadata=Metadata(name=name), status=report)
    fields = document.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    named = {"apiVersion": document.api_version, "kind": document.kind, **fields}
    return json.dumps(named, separators=(",", ":")).encode()
