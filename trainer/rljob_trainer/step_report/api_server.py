"""Requests of a pod to the API server of its cluster, with its service account."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import urllib3

_TIMEOUT = urllib3.Timeout(connect=3.0, read=5.0)


class NoAnswer(Exception):
    """The API server was not reached, or refused the request."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        """`retry_after_seconds`: as requested by the API server; 0 if it named none."""
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ApiServer:
    def __init__(self, host: str, port: str, service_account: Path) -> None:
        """`service_account`: the directory that Kubernetes mounts, with `token` and `ca.crt`."""
        self._token = service_account / "token"
        host = f"[{host}]" if ":" in host else host
        self._url = f"https://{host}:{port}"
        self._pool = urllib3.PoolManager(ca_certs=str(service_account / "ca.crt"), timeout=_TIMEOUT, retries=False)

    def merge(self, path: str, patch: bytes) -> bytes:
        """JSON merge patch. Returns the object. Raises `NoAnswer`."""
        return self._patch(path, patch, "application/merge-patch+json")

    def apply(self, path: str, body: bytes, field_manager: str) -> None:
        """Server-side apply of `body`, which takes over fields that others wrote. Raises `NoAnswer`."""
        self._patch(f"{path}?fieldManager={field_manager}&force=true", body, "application/apply-patch+yaml")

    def _patch(self, path: str, body: bytes, content_type: str) -> bytes:
        try:
            # Read each time: the token is replaced before it expires.
            headers = {
                "Authorization": f"Bearer {self._token.read_text(encoding='utf-8').strip()}",
                "Accept": "application/json",
                "Content-Type": content_type,
            }
            response = self._pool.request("PATCH", self._url + path, body=body, headers=headers)
        except (OSError, urllib3.exceptions.HTTPError) as error:
            raise NoAnswer(f"the API server cannot be reached: {error}") from error
        if response.status >= 300:
            raise NoAnswer(
                f"the API server answered {response.status}: {_reason(response.data)}",
                _seconds(response.headers.get("Retry-After")),
            )
        return response.data


def _reason(body: bytes) -> str:
    """The message of a Kubernetes Status, else the beginning of the response."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["message"])
    return body[:200].decode(errors="replace")


def _seconds(header: str | None) -> float:
    return float(header) if header and header.isdigit() else 0.0
