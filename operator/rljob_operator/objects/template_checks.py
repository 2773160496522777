"""Errors in a manifest that cannot be turned into pods: checks of types and quantities in templates."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from rljob_api.quantity import quantity_value, shown


class InvalidTemplate(ValueError):
    """The message names the field, the error and the fix."""


def expect_object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidTemplate(f"{path}: expected an object, found {kind_of(value)}")
    return value


def expect_list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidTemplate(f"{path}: expected a list, found {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """The kind of a value, as messages name it."""
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else "a value"


# --- Quantities ---


def quantity_text(value: Fraction) -> str:
    """`value` as a quantity: an integer if possible, else in thousandths, rounded up."""
    return str(value.numerator) if value.denominator == 1 else f"{math.ceil(value * 1000)}m"


_OBJECTS_OF_QUANTITIES = ("limits", "requests", "overhead")
_QUANTITIES = ("sizeLimit", "divisor")
_FREE_TEXTS = ("annotations", "labels", "matchLabels", "nodeSelector", "options", "volumeAttributes")
"""Fields whose keys are the user's."""


def require_quantities(part: Any, path: str) -> None:
    """Raise InvalidTemplate if a quantity in a part of a pod's spec is none, or out of range.

    The API server would refuse it too, but takes minutes of CPU time to read one such as 1e9999999.
    """
    if isinstance(part, list):
        for i, element in enumerate(part):
            require_quantities(element, f"{path}[{i}]")
    elif isinstance(part, dict):
        for name, value in part.items():
            if name in _QUANTITIES:
                _require_quantity(value, f"{path}.{name}")
            elif name in _OBJECTS_OF_QUANTITIES:
                for resource, quantity in expect_object(value or {}, f"{path}.{name}").items():
                    _require_quantity(quantity, f"{path}.{name}[{shown(resource)}]")
            elif name == "resources":
                require_quantities(expect_object(value or {}, f"{path}.{name}"), f"{path}.{name}")
            elif name not in _FREE_TEXTS:
                require_quantities(value, f"{path}.{name}")


def _require_quantity(quantity: Any, path: str) -> None:
    """null counts as absent."""
    try:
        if quantity is not None:
            quantity_value(quantity)
    except ValueError as error:
        raise InvalidTemplate(f"{path}: {error}") from None


def limits_and_requests(container: dict[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Limits and requests of a container at `path`. Raises InvalidTemplate if they are no objects."""
    resources = expect_object(container.get("resources") or {}, f"{path}.resources")
    limits = expect_object(resources.get("limits") or {}, f"{path}.resources.limits")
    return limits, expect_object(resources.get("requests") or {}, f"{path}.resources.requests")
