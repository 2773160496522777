"""The minimal patch between two statuses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rljob_api.bounds import within_bounds
from rljob_api.status import RLJobStatus
from rljob_operator.kube.resources import Object


def status_object(status: RLJobStatus) -> Object:
    """The status in its stored form, which the API server accepts."""
    stored: Object = within_bounds(status.model_dump(mode="json", by_alias=True, exclude_none=True), RLJobStatus)
    return stored


def merge_patch(before: Object, after: Object) -> Object:
    """The JSON merge patch (RFC 7386) that turns `before` into `after`; empty if they are equal."""
    patch: Object = {name: None for name in before if name not in after}
    for name, value in after.items():
        known: Any = before.get(name)
        if isinstance(known, dict) and isinstance(value, dict):
            if known != value:
                patch[name] = merge_patch(known, value)
        elif known != value or name not in before:
            patch[name] = value
    return patch


def condition_patch(status: Object, type_: str, condition: Object, generation: int) -> Object:
    """The patch that sets a condition to False; empty if it has this content already, or is True."""
    stored = [known for known in status.get("conditions") or () if isinstance(known, dict)]
    before = next((known for known in stored if known.get("type") == type_), {})
    if before.get("status") == "True" or all(before.get(name) == value for name, value in condition.items()):
        return {}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    changed = {
        "type": type_,
        "status": "False",
        "lastTransitionTime": before.get("lastTransitionTime", now),
        "observedGeneration": generation,
    } | condition
    return {"conditions": [*(known for known in stored if known is not before), changed]}
