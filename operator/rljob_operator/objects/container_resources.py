"""Kubernetes quantities, and the resources that a container requests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

from rljob_operator.objects.invalid_template import expect_object

_FACTORS = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
}


def total_quantity(quantities: Iterable[str | int | float]) -> str:
    """The sum as a quantity: an integer if possible, else in thousandths, rounded up. Raises ValueError."""
    total = sum((_value(quantity) for quantity in quantities), Decimal(0))
    if total == total.to_integral_value():
        return str(int(total))
    return f"{math.ceil(total * 1000)}m"


def _value(quantity: str | int | float) -> Decimal:
    found = re.fullmatch(r"([0-9.]+(?:[eE][-+]?[0-9]+)?)([a-zA-Z]*)", str(quantity))
    try:
        if found:
            return Decimal(found[1]) * _FACTORS[found[2]]
    except (InvalidOperation, KeyError):
        pass
    raise ValueError(f"expected a quantity such as 500m or 4Gi, found {quantity!r}")


def limits_and_requests(container: dict[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Limits and requests of a container at `path`. Raises InvalidTemplate if they are no objects."""
    resources = expect_object(container.get("resources") or {}, f"{path}.resources")
    limits = expect_object(resources.get("limits") or {}, f"{path}.resources.limits")
    return limits, expect_object(resources.get("requests") or {}, f"{path}.resources.requests")
