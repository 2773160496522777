"""What can come back from the API server instead of an answer, by what there is to do about it."""

from __future__ import annotations

from typing import Any

_MAX_SENTENCE = 1024


class ApiError(Exception):
    """The API server said no. `sentence` is its own; `code` the HTTP status; `causes` the reasons of its details."""

    def __init__(self, sentence: str, code: int = 0, causes: frozenset[str] = frozenset()) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code
        self.causes = causes


class NotFound(ApiError):
    """There is no such object, or no such API."""


class AlreadyExists(ApiError):
    """An object of this name exists."""


class Conflict(ApiError):
    """The object has changed since it was observed, or it is another one of the same name: look again."""


class Forbidden(ApiError):
    """Rights, a quota or an admission policy stand in the way."""


class NamespaceTerminating(Forbidden):
    """Nothing can be made in a namespace that is being deleted."""


class Invalid(ApiError):
    """The object is not valid: it will be refused again."""


class Gone(ApiError):
    """The revision to go on from is too old: list again."""


class Unavailable(ApiError):
    """Nobody answered, or the API server is overloaded or broken: the same may work later.

    `retry_after_seconds`: what the API server asks for.
    """

    retry_after_seconds: float | None = None


def error_of(code: int, status: Any, retry_after: str | None = None) -> ApiError:
    """The error for an answer with HTTP status `code`; `status`: its body, a metav1.Status where all is well."""
    body = status if isinstance(status, dict) else {}
    details = body.get("details") or {}
    causes = frozenset(str(cause.get("reason")) for cause in details.get("causes") or ())
    sentence = str(body.get("message") or status or f"HTTP status {code}")[:_MAX_SENTENCE]
    error = _kind_of(code, str(body.get("reason")), causes)(sentence, code, causes)
    if isinstance(error, Unavailable):
        error.retry_after_seconds = _seconds(retry_after or details.get("retryAfterSeconds"))
    return error


def _kind_of(code: int, reason: str, causes: frozenset[str]) -> type[ApiError]:
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
