"""Kubernetes quantities, and types of settings that are `Auto` or a value."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

_FACTORS: dict[str, int] = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T", "P"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), start=1)},
}
_QUANTITY = r"[0-9]{1,19}(\.[0-9]{1,9})?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"
_LARGEST = 2**63 - 1
_SHOWN_CHARACTERS = 40


def quantity_bytes(quantity: int | str) -> int:
    """Bytes of a Kubernetes quantity: `512Mi`, `1.5G`, `4294967296`. Fractions of a byte are rounded up.

    Raises ValueError if it is not a positive quantity of bytes below 2**63.
    """
    text = str(quantity)
    if isinstance(quantity, bool | float) or not re.fullmatch(_QUANTITY, text):
        raise ValueError(f"expected a quantity of bytes such as 512Mi or 4Gi, found {shown(quantity)}")
    number = text.rstrip("kKMGTPi")
    size = math.ceil(Decimal(number) * _FACTORS[text[len(number) :]])
    if not 0 < size <= _LARGEST:
        raise ValueError(f"expected a positive quantity of bytes below 8Ei, found {shown(quantity)}")
    return size


_NUMBER = r"\+?([0-9]{1,19}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})"
_VALUE = re.compile(rf"{_NUMBER}(?:([numkMGTPE]|[KMGTPE]i)|[eE]([-+]?[0-9]{{1,2}}))?")
_ALL_FACTORS: dict[str, Fraction] = {
    **{unit: Fraction(1, 1000**power) for power, unit in enumerate("mun", start=1)},
    **{unit: Fraction(factor) for unit, factor in _FACTORS.items()},
    "E": Fraction(1000**6),
    "Ei": Fraction(1024**6),
}


def quantity_value(quantity: Any) -> Fraction:
    """Value of any quantity that a container can request: `500m`, `4Gi`, `1e3`, 2.

    The length is bounded before any arithmetic: a string such as 1e999999 would take minutes. Raises ValueError if it
    is not a quantity from 0 to 2**63 - 1, the largest one of Kubernetes.
    """
    found = _VALUE.fullmatch(str(quantity)) if isinstance(quantity, str | int | float) else None
    if found is not None and not isinstance(quantity, bool):
        value = Fraction(found[1]) * _ALL_FACTORS[found[2] or ""] * Fraction(10) ** int(found[3] or 0)
        if value <= _LARGEST:
            return value
    raise ValueError(f"expected a quantity such as 500m or 4Gi, found {shown(quantity)}; write a number below 2**63")


def shown(value: Any) -> str:
    """A value of a manifest in a message. It may have any size."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


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


def _parse_auto_or_count(given: Any, most: int | None = None) -> int | str:
    if given == "Auto":
        return "Auto"
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= (most or 2**31 - 1):
        return given
    bounds = f"from 1 to {most}" if most else "of at least 1"
    raise PydanticCustomError("text", f"Auto or a whole number {bounds}")


def _int_or_string(pattern: str, **bounds: int) -> dict[str, Any]:
    return {
        "anyOf": [{"type": "integer", "minimum": 1} | bounds, {"type": "string", "pattern": pattern, "maxLength": 32}],
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

_MOST_ENGINE_GPUS = 16
AutoOrEngineSize = Annotated[
    int | Literal["Auto"],
    BeforeValidator(partial(_parse_auto_or_count, most=_MOST_ENGINE_GPUS)),
    WithJsonSchema(_int_or_string("^Auto$", maximum=_MOST_ENGINE_GPUS)),
]
"""`Auto`, or a number of GPUs of one pod."""
