"""What a container asks for, where a user may have written it."""

from __future__ import annotations

from typing import Any

from rljob_operator.objects.invalid_template import expect_object


def limits_and_requests(container: dict[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Raises InvalidTemplate where they are no objects; `path`: of the container."""
    resources = expect_object(container.get("resources") or {}, f"{path}.resources")
    limits = expect_object(resources.get("limits") or {}, f"{path}.resources.limits")
    return limits, expect_object(resources.get("requests") or {}, f"{path}.resources.requests")
