"""The one object in the cluster that the trainer may write: its job's StepReport, by server-side apply."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import urllib3
from pydantic import ValidationError

from rljob_api.names import API_VERSION
from rljob_api.step_report import StepReport

FIELD_MANAGER = "rljob-trainer"
_TIMEOUT = urllib3.Timeout(connect=3.0, read=5.0)


class ReportNotWritten(Exception):
    """The API server was not reached, or refused. `retry_after_seconds`: what it asked for, else 0."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class StepReportClient:
    def __init__(self, host: str, port: str, service_account: Path, namespace: str, name: str) -> None:
        """`service_account`: the directory that Kubernetes mounts, with `token` and `ca.crt`."""
        self._token = service_account / "token"
        host = f"[{host}]" if ":" in host else host
        self._url = f"https://{host}:{port}/apis/{API_VERSION}/namespaces/{namespace}/stepreports/{name}"
        self._pool = urllib3.PoolManager(ca_certs=str(service_account / "ca.crt"), timeout=_TIMEOUT, retries=False)

    def apply(self, report: StepReport) -> None:
        """Make `report` all that this field manager says. Raises `ReportNotWritten`."""
        self._request("PATCH", f"?fieldManager={FIELD_MANAGER}&force=true", encoded(report))

    def read(self) -> StepReport | None:
        """The report as it is; None where it is not one. Raises `ReportNotWritten` where it cannot be read."""
        response = self._request("GET")
        with suppress(ValidationError):
            return StepReport.model_validate_json(response.data)
        return None

    def _request(self, method: str, query: str = "", body: bytes | None = None) -> urllib3.BaseHTTPResponse:
        try:
            # Read each time: the token is replaced before it expires.
            headers = {"Authorization": f"Bearer {self._token.read_text().strip()}", "Accept": "application/json"}
            if body is not None:
                headers["Content-Type"] = "application/apply-patch+yaml"
            response = self._pool.request(method, self._url + query, body=body, headers=headers)
        except (OSError, urllib3.exceptions.HTTPError) as error:
            raise ReportNotWritten(f"the API server cannot be reached: {error}") from error
        if response.status >= 300:
            raise ReportNotWritten(
                f"the API server answered {response.status}: {_reason(response.data)}",
                _seconds(response.headers.get("Retry-After")),
            )
        return response


def encoded(report: StepReport) -> bytes:
    """The body of an apply: JSON, which is YAML. Defaults are left out, but for those that name the type."""
    fields = report.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    named = {"apiVersion": report.api_version, "kind": report.kind, **fields}
    return json.dumps(named, separators=(",", ":")).encode()


def _reason(body: bytes) -> str:
    """The message of a Kubernetes Status, else the beginning of what came."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["message"])
    return body[:200].decode(errors="replace")


def _seconds(header: str | None) -> float:
    return float(header) if header and header.isdigit() else 0.0
