"""Errors of requests to the API server, classified by how to handle them, and retries."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_MAX_MESSAGE = 1024


class ApiError(Exception):
    """The API server refused. `message` is its own."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NotFound(ApiError):
    """There is no such object, or no such API."""


class NamespaceGone(NotFound):
    """The namespace does not exist any more, and its objects with it."""


class AlreadyExists(ApiError):
    """An object of this name exists."""


class Conflict(ApiError):
    """The object has changed since it was observed, or another one has its name: observe it again."""


class Forbidden(ApiError):
    """RBAC, a quota, an admission policy or a webhook refused the request."""


class NamespaceTerminating(Forbidden):
    """Nothing can be created in a namespace that is being deleted."""


class Invalid(ApiError):
    """The object is not valid; a retry would be refused too."""


class Gone(ApiError):
    """The resourceVersion is too old: list again."""


class Unavailable(ApiError):
    """No answer, or the API server is overloaded or broken: a retry may work."""

    retry_after_seconds: float | None = None
    """Wait that the API server asks for."""


class WebhookFailed(Unavailable):
    """The API server got no answer from an admission webhook: a retry may work, or a person must repair the webhook."""


def error_of(code: int, status: Any, retry_after: str | None = None) -> ApiError:
    """The error for a response with HTTP status `code` and body `status`, usually a metav1.Status."""
    body = status if isinstance(status, dict) else {}
    details = body.get("details") or {}
    causes = frozenset(str(cause.get("reason")) for cause in details.get("causes") or ())
    message = str(body.get("message") or status or f"HTTP status {code}")[:_MAX_MESSAGE]
    kind = _of_webhook(message) or _kind_of(code, str(body.get("reason")), causes, str(details.get("kind")))
    error = kind(message)
    if isinstance(error, Unavailable):
        error.retry_after_seconds = _seconds(retry_after or details.get("retryAfterSeconds"))
    return error


def _of_webhook(message: str) -> type[ApiError] | None:
    """A webhook chooses the code of its refusal, so 409 is no conflict then, and 429 no overload."""
    if message.startswith('admission webhook "'):
        return Forbidden
    return WebhookFailed if "failed calling webhook" in message else None


def _kind_of(code: int, reason: str, causes: frozenset[str], kind: str) -> type[ApiError]:
    if code == 404 and kind == "namespaces":
        return NamespaceGone
    if code == 409:
        return AlreadyExists if reason == "AlreadyExists" else Conflict
    if code == 403 and "NamespaceTerminating" in causes:
        return NamespaceTerminating
    if code in (408, 429) or code >= 500:
        return Unavailable
    return {403: Forbidden, 404: NotFound, 410: Gone, 401: Unavailable}.get(code, Invalid)


def _seconds(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


# --- Retries ---


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `attempts` tries, with waits that double from `first_seconds` to `longest_seconds`, and jitter."""

    attempts: int = 5
    first_seconds: float = 0.2
    longest_seconds: float = 5.0
    longest_retry_after_seconds: float = 30.0

    def wait_seconds(self, tries: int, error: Unavailable) -> float | None:
        """Seconds until the next try, after `tries` tries; at least what the API server asks for. None to give up."""
        if tries >= self.attempts:
            return None
        backoff = min(self.first_seconds * 2.0 ** (tries - 1), self.longest_seconds)
        asked_for = min(error.retry_after_seconds or 0.0, self.longest_retry_after_seconds)
        return max(backoff * random.uniform(0.5, 1.0), asked_for)
