"""Kubernetes quantities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.quantity import byte_quantity
from rljob_operator.objects.container_resources import total_quantity


@pytest.mark.parametrize(
    ("size_bytes", "quantity"),
    [(50 << 30, "50Gi"), (1 << 40, "1Ti"), (1536 << 20, "1536Mi"), (3 << 10, "3Ki"), (1000, "1000")],
)
def test_bytes_are_written_in_the_largest_unit_that_fits(size_bytes: int, quantity: str) -> None:
    assert byte_quantity(size_bytes) == quantity


@given(st.integers(1, 1 << 50))
def test_a_quantity_says_the_same_bytes(size_bytes: int) -> None:
    assert total_quantity([byte_quantity(size_bytes)]) == str(size_bytes)


@pytest.mark.parametrize(
    ("quantities", "total"),
    [
        (["500m", "1"], "1500m"),
        (["500m", "500m"], "1"),
        (["1Gi", "1G"], str((1 << 30) + 10**9)),
        ([2, "0.5"], "2500m"),
        (["100u"], "1m"),
        (["1e3"], "1000"),
        ([], "0"),
    ],
)
def test_quantities_add_up(quantities: list[str | int], total: str) -> None:
    assert total_quantity(quantities) == total


@pytest.mark.parametrize("text", ["", "lots", "1 Gi", "1Xi", "1..2", "-1"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a quantity such as 500m or 4Gi"):
        total_quantity([text])
