"""Requests of a pod to the API server of its cluster, with its service account, and writes of its StepReport."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import urllib3
from pydantic import ValidationError

from rljob_api.metadata import API_VERSION, Metadata
from rljob_api.step_report import StepReport, StepReportStatus

_TIMEOUT = urllib3.Timeout(connect=3.0, read=5.0)


class NoAnswer(Exception):
    """The API server was not reached, or refused the request."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        """`retry_after_seconds`: as requested by the API server; 0 if it named none."""
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


FIELD_MANAGER = "rljob-trainer"


class StepReportClient:
    """Reads and writes the status of one StepReport, with the service account of the pod."""

    def __init__(self, host: str, port: str, service_account: Path, namespace: str, name: str) -> None:
        """`service_account`: the directory that Kubernetes mounts, with `token` and `ca.crt`."""
        self._name = name
        self._token = service_account / "token"
        host = f"[{host}]" if ":" in host else host
        path = f"/apis/{API_VERSION}/namespaces/{namespace}/stepreports/{name}/status"
        self._url = f"https://{host}:{port}{path}"
        self._pool = urllib3.PoolManager(ca_certs=str(service_account / "ca.crt"), timeout=_TIMEOUT, retries=False)

    def apply(self, report: StepReportStatus) -> None:
        """Apply `report` with all fields of this field manager, also those that others wrote. Raises `NoAnswer`."""
        query = f"?fieldManager={FIELD_MANAGER}&force=true"
        self._patch("application/apply-patch+yaml", encoded(self._name, report), query)

    def read(self) -> StepReportStatus | None:
        """The stored report; None if there is none or it is not valid. Raises `NoAnswer` if it cannot be read.

        The answer to an empty patch, which changes and stores nothing: the right to `get` would be one more.
        """
        found = self._patch("application/merge-patch+json", b"{}")
        with suppress(ValidationError):
            return StepReport.model_validate_json(found).status
        return None

    def _patch(self, content_type: str, body: bytes, query: str = "") -> bytes:
        try:
            # Read each time: the token is replaced before it expires.
            headers = {
                "Authorization": f"Bearer {self._token.read_text(encoding='utf-8').strip()}",
                "Accept": "application/json",
                "Content-Type": content_type,
            }
            response = self._pool.request("PATCH", self._url + query, body=body, headers=headers)
        except (OSError, urllib3.exceptions.HTTPError) as error:
            raise NoAnswer(f"the API server cannot be reached: {error}") from error
        if response.status >= 300:
            raise NoAnswer(
                f"the API server answered {response.status}: {_reason(response.data)}",
                _seconds(response.headers.get("Retry-After")),
            )
        return response.data


def encoded(name: str, report: StepReportStatus) -> bytes:
    """The body of an apply: JSON, which is YAML. Defaults are left out, except those that name the type."""
    document = StepReport(metadata=Metadata(name=name), status=report)
    fields = document.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    named = {"apiVersion": document.api_version, "kind": document.kind, **fields}
    return json.dumps(named, separators=(",", ":")).encode()


def _reason(body: bytes) -> str:
    """The message of a Kubernetes Status, else the beginning of the response."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["message"])
    return body[:200].decode(errors="replace")


def _seconds(header: str | None) -> float:
    return float(header) if header and header.isdigit() else 0.0
