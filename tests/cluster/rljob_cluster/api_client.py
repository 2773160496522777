"""Requests to the API server during the start of a cluster."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rljob_cluster.certificates import KeyPair
from rljob_cluster.commands import ClusterError
from rljob_cluster.control_plane_programs import ADMIN_GROUP, ADMIN_USER, ControlPlaneLayout

READY_SECONDS = ESTABLISHED_SECONDS = 240.0
"""Tests of other processes may leave the API server a tenth of two cores for a while."""
POLL_SECONDS = 0.1
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@dataclass(frozen=True, slots=True)
class StartupClient:
    """Client of an API server that authenticates by a client certificate."""

    url: str
    authority: KeyPair
    user: KeyPair

    def get(self, path: str) -> bytes | None:
        """Body of the response; None if the server cannot be reached or does not answer with 200."""
        return self._request("GET", path)

    def merge(self, path: str, patch: object) -> bool:
        """Apply a merge patch to the object at `path`. Returns False if the server refused it."""
        return self._request("PATCH", path, json.dumps(patch), "application/merge-patch+json") is not None

    def wait_ready(self, check: Callable[[], None], seconds: float = READY_SECONDS) -> None:
        """Wait until the server is ready. Calls `check`, which may raise, between requests.

        Raises ClusterError if it is not ready after `seconds`.
        """
        end = time.monotonic() + seconds
        while self.get("/readyz") is None:
            check()
            if time.monotonic() > end:
                raise ClusterError(f"the API server at {self.url} is not ready after {seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def wait_established(self, seconds: float = ESTABLISHED_SECONDS) -> None:
        """Wait until all CustomResourceDefinitions are established, at least one.

        Raises ClusterError after `seconds`. `kubectl wait --for=condition=Established` (1.36) fails at once if it reads
        a CustomResourceDefinition whose `status.conditions` is still null, as it is for a moment after the creation;
        so does its jsonpath with a filter.
        """
        end = time.monotonic() + seconds
        while (missing := _not_established(self.get(_CRDS))) is not None:
            if time.monotonic() > end:
                raise ClusterError(
                    f"expected established CustomResourceDefinitions after {seconds:g} s, found {missing}"
                )
            time.sleep(POLL_SECONDS)

    def _request(self, verb: str, path: str, body: str | None = None, kind: str = "application/json") -> bytes | None:
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        context.load_cert_chain(self.user.certificate, self.user.key)
        address = urlsplit(self.url)
        connection = http.client.HTTPSConnection(address.hostname or "", address.port, timeout=5, context=context)
        try:
            connection.request(verb, path, body, {"Content-Type": kind})
            response = connection.getresponse()
            return response.read() if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def _not_established(response: bytes | None) -> str | None:
    """The reason to wait, from a list of CustomResourceDefinitions; None if all are established."""
    if response is None:
        return "no answer from the API server"
    crds = json.loads(response)["items"]
    waiting = [crd["metadata"]["name"] for crd in crds if not _is_established(crd)]
    return "none" if not crds else f"these without the condition: {', '.join(waiting)}" if waiting else None


def _is_established(crd: dict[str, Any]) -> bool:
    conditions = (crd.get("status") or {}).get("conditions") or ()
    return any((condition["type"], condition["status"]) == ("Established", "True") for condition in conditions)


def admin_client(layout: ControlPlaneLayout) -> StartupClient:
    """Client with all permissions."""
    authority = layout.authority
    return StartupClient(layout.url, authority.pair, authority.client("kubeconfig", ADMIN_USER, ADMIN_GROUP))
