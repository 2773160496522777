"""Kubernetes quantities, and the resources that a container requests."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from rljob_operator.objects.invalid_template import expect_object


def quantity_text(value: Fraction) -> str:
    """`value` as a quantity: an integer if possible, else in thousandths, rounded up."""
    return str(value.numerator) if value.denominator == 1 else f"{math.ceil(value * 1000)}m"


def limits_and_requests(container: dict[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Limits and requests of a container at `path`. Raises InvalidTemplate if they are no objects."""
    resources = expect_object(container.get("resources") or {}, f"{path}.resources")
    limits = expect_object(resources.get("limits") or {}, f"{path}.resources.limits")
    return limits, expect_object(resources.get("requests") or {}, f"{path}.resources.requests")
