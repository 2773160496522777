"""Verb and resource of a request to the API server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

WRITE_VERBS = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_QUESTIONS = ("tokenreviews", "subjectaccessreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews")
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(slots=True)
class RecordedRequest:
    """`resource` is plural, with its subresource: `rljobs/status`. It is empty for other paths such as /version."""

    verb: str
    resource: str
    namespace: str
    name: str
    time: float = field(default_factory=time.monotonic)
    status: int = 0
    """HTTP status of the answer; 0 without an answer so far."""

    @property
    def is_write(self) -> bool:
        """True if the request changes an object of a job: not a Lease, not an access review."""
        return self.verb in WRITE_VERBS and bool(self.resource) and self.resource not in (*_QUESTIONS, "leases")

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.namespace}/{self.name} -> {self.status}"


def read_request(method: str, path: str, query: Mapping[str, str]) -> RecordedRequest:
    """Verb and resource as the API server's authorizer names them."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:] if parts[0] == "apis" else []
    namespace = ""
    if len(parts) > 2 and parts[0] == "namespaces" and parts[2] not in ("status", "finalize"):
        namespace, parts = parts[1], parts[2:]
    resource, name = (parts[0] if parts else ""), (parts[1] if len(parts) > 1 else "")
    if len(parts) > 2:
        resource = f"{resource}/{parts[2]}"
    if method == "GET":
        watching = query.get("watch") in ("true", "1")
        verb = "watch" if watching else "get" if name else "list"
    else:
        verb = _VERBS[method] if name or method != "DELETE" else "deletecollection"
    return RecordedRequest(verb, resource, namespace, name)
