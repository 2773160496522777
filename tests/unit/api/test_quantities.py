"""Kubernetes quantities, of bytes and of anything that a container can request."""

from __future__ import annotations

import string
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.memory_plan import MemorySettings
from rljob_api.quantity import byte_quantity, quantity_bytes, quantity_value
from rljob_operator.objects.placement import quantity_text


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [("1", 1), (7, 7), ("1k", 1000), ("1Ki", 1024), ("1.5Gi", 3 << 29), ("2G", 2 * 10**9), ("1.0001k", 1001)],
)
def test_a_quantity_of_bytes_is_read_and_rounded_up(written: int | str, size_bytes: int) -> None:
    assert quantity_bytes(written) == size_bytes


@pytest.mark.parametrize(
    "written", ["", "0", 0, -1, "-1Gi", "1GB", "1 Gi", "Gi", "1e3", True, "100000P", "1gi", "1.Gi"]
)
def test_text_that_is_not_a_quantity_of_bytes_is_refused(written: int | str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        quantity_bytes(written)


@pytest.mark.parametrize(
    ("size_bytes", "quantity"),
    [(50 << 30, "50Gi"), (1 << 40, "1Ti"), (1536 << 20, "1536Mi"), (3 << 10, "3Ki"), (1000, "1000")],
)
def test_bytes_are_written_in_the_largest_unit_that_fits(size_bytes: int, quantity: str) -> None:
    assert byte_quantity(size_bytes) == quantity


@given(st.integers(1, 1 << 50))
def test_written_bytes_are_read_as_the_same_bytes(size_bytes: int) -> None:
    written = byte_quantity(size_bytes)
    assert quantity_bytes(written) == quantity_bytes(size_bytes) == size_bytes
    assert quantity_text(quantity_value(written)) == str(size_bytes)


@pytest.mark.parametrize(
    ("quantities", "total"),
    [
        (["500m", "1"], "1500m"),
        (["500m", "500m"], "1"),
        (["1Gi", "1G"], str((1 << 30) + 10**9)),
        ([2, "0.5"], "2500m"),
        (["100u"], "1m"),
        (["1E2", "+1", "1.", "500m", "0.5", "7Ei", "1e3"], str((7 << 60) + 1103)),
        ([], "0"),
    ],
)
def test_quantities_add_up(quantities: list[str | int], total: str) -> None:
    assert quantity_text(sum(map(quantity_value, quantities), Fraction(0))) == total


NONE: list[Any] = [
    *(True, None, [1], {"a": 1}, 1e300, "", "lots", "1 Gi", "1Xi", "1..2", "-1", "²"),
    *("1e999999", "1e9999999", "1e100", "16Ei", "9" * 5_000, "1e-999999"),
]


@pytest.mark.parametrize("written", NONE, ids=lambda written: repr(written)[:20])
def test_anything_but_a_quantity_is_refused(written: Any) -> None:
    with pytest.raises(ValueError, match="expected a quantity such as 500m or 4Gi") as refusal:
        quantity_value(written)
    assert len(str(refusal.value)) < 200


@given(st.text(string.digits + ".eE+-numkMGTPi", max_size=40))
def test_the_value_of_a_text_of_any_form_is_in_range_or_refused(text: str) -> None:
    try:
        value = quantity_value(text)
    except ValueError:
        return
    assert 0 <= value < 2**63


def test_settings_are_auto_or_bytes() -> None:
    settings = MemorySettings.model_validate({"kvCache": "2Gi", "syncBucketSize": 1048576})
    assert (settings.kv_cache, settings.sync_bucket_size, settings.micro_batch_tokens) == (2 << 30, 1 << 20, "Auto")
