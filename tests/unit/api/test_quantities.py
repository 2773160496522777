"""Kubernetes quantities are read as bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.memory_settings import MemorySettings
from rljob_api.quantity import quantity_bytes


@pytest.mark.parametrize(
    ("written", "size"),
    [("1", 1), (7, 7), ("1k", 1000), ("1Ki", 1024), ("512Mi", 512 << 20), ("1.5Gi", 3 << 29), ("2G", 2 * 10**9)],
)
def test_a_quantity_is_read_as_bytes(written: int | str, size: int) -> None:
    assert quantity_bytes(written) == size


def test_fractions_of_a_byte_are_rounded_up() -> None:
    assert quantity_bytes("1.0001k") == 1001


@pytest.mark.parametrize(
    "written", ["", "0", 0, -1, "-1Gi", "1GB", "1 Gi", "Gi", "1e3", True, "100000P", "1gi", "1.Gi"]
)
def test_text_that_is_not_a_quantity_of_bytes_is_refused(written: int | str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        quantity_bytes(written)


@given(st.integers(1, 2**62))
def test_a_plain_number_counts_bytes(size: int) -> None:
    assert quantity_bytes(size) == quantity_bytes(str(size)) == size


@given(st.integers(1, 2**40 - 1), st.sampled_from([("Ki", 10), ("Mi", 20)]))
def test_binary_units_are_powers_of_1024(number: int, unit: tuple[str, int]) -> None:
    assert quantity_bytes(f"{number}{unit[0]}") == number << unit[1]


def test_settings_are_auto_or_bytes() -> None:
    settings = MemorySettings.model_validate({"kvCache": "2Gi", "syncBucketSize": 1048576})
    assert (settings.kv_cache, settings.sync_bucket_size, settings.micro_batch_tokens) == (2 << 30, 1 << 20, "Auto")
