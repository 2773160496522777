"""Kubernetes quantities, and types of settings that are `Auto` or a value."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

_FACTORS: dict[str, int] = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T", "P"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), start=1)},
}
_QUANTITY = r"[0-9]{1,19}(\.[0-9]{1,9})?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"
_LARGEST_BYTES = 2**63 - 1


def quantity_bytes(quantity: int | str) -> int:
    """Bytes of a Kubernetes quantity: `512Mi`, `1.5G`, `4294967296`. Fractions of a byte are rounded up.

    Raises ValueError if it is not a positive quantity of bytes below 2**63.
    """
    text = str(quantity)
    if isinstance(quantity, bool | float) or not re.fullmatch(_QUANTITY, text):
        raise ValueError(f"expected a quantity of bytes such as 512Mi or 4Gi, found {quantity!r}")
    number = text.rstrip("kKMGTPi")
    size = math.ceil(Decimal(number) * _FACTORS[text[len(number) :]])
    if not 0 < size <= _LARGEST_BYTES:
        raise ValueError(f"expected a positive quantity of bytes below 8Ei, found {quantity!r}")
    return size


def byte_quantity(size_bytes: int) -> str:
    """`50Gi` for 50 << 30: exactly `size_bytes`, in the largest binary unit that divides it."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        count, rest = divmod(size_bytes, _FACTORS[unit])
        if not rest:
            return f"{count}{unit}"
    return str(size_bytes)


def _parse_bytes(given: Any) -> int:
    try:
        return quantity_bytes(given)
    except (ValueError, TypeError):
        raise PydanticCustomError("text", "a quantity of bytes such as 512Mi or 4Gi") from None


def _parse_auto_or_bytes(given: Any) -> int | str:
    if given == "Auto":
        return "Auto"
    try:
        return quantity_bytes(given)
    except (ValueError, TypeError):
        raise PydanticCustomError("text", "Auto or a quantity of bytes such as 512Mi or 4Gi") from None


def _parse_auto_or_count(given: Any) -> int | str:
    if given == "Auto":
        return "Auto"
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= 2**31 - 1:
        return given
    raise PydanticCustomError("text", "Auto or a whole number of at least 1")


def _int_or_string(pattern: str) -> dict[str, Any]:
    return {
        "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": pattern, "maxLength": 32}],
        "x-kubernetes-int-or-string": True,
    }


Bytes = Annotated[int, BeforeValidator(_parse_bytes), WithJsonSchema(_int_or_string(f"^{_QUANTITY}$"))]
"""A Kubernetes quantity in manifests, bytes in Python."""

AutoOrBytes = Annotated[
    int | Literal["Auto"],
    BeforeValidator(_parse_auto_or_bytes),
    WithJsonSchema(_int_or_string(f"^(Auto|{_QUANTITY})$")),
]
"""`Auto`, or a Kubernetes quantity that is converted to bytes."""

AutoOrCount = Annotated[
    int | Literal["Auto"], BeforeValidator(_parse_auto_or_count), WithJsonSchema(_int_or_string("^Auto$"))
]
"""`Auto`, or a positive whole number."""
