"""A memory sample and its line in a log."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_memory.sample import MemorySample

NUMBERS = [field.name for field in fields(MemorySample) if field.type == "int"]
samples = st.builds(
    MemorySample,
    time=st.none() | st.floats(0, 1e10),
    began=st.none() | st.floats(0, 1e10),
    step=st.none() | st.integers(0, 99),
    phase=st.none() | st.sampled_from(["load", "update"]),
    micro_batch=st.none() | st.integers(0, 99),
    **{name: st.integers(0, 1 << 40) for name in NUMBERS},
)


@given(samples)
def test_line_of_a_sample_is_read_as_it_was_written(sample: MemorySample) -> None:
    assert MemorySample.from_line(json.loads(json.dumps(sample.as_line()))) == sample


def test_short_names_of_older_logs_are_read() -> None:
    line = {"step": 3, "phase": "sync", "allocated": 1, "peak_reserved": 2, "shm_used": 3, "shm_size": 4, "rss": 5}
    assert MemorySample.from_line(line) == MemorySample(
        step=3,
        phase="sync",
        allocated_bytes=1,
        peak_reserved_bytes=2,
        shared_memory_used_bytes=3,
        shared_memory_bytes=4,
        rss_bytes=5,
    )


@pytest.mark.parametrize("line", [{}, {"step": 1}, {"allocated_bytes": -1}, {"allocated": True}, {"allocated": "1"}])
def test_line_without_allocated_memory_is_not_a_sample(line: dict[str, Any]) -> None:
    assert MemorySample.from_line(line) is None


def test_values_of_another_type_are_left_out() -> None:
    line = {"allocated_bytes": 1, "reserved_bytes": "2", "time": True, "phase": 7, "step": -1, "unknown": 3}
    assert MemorySample.from_line(line) == MemorySample(allocated_bytes=1)


@pytest.mark.parametrize("time", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 400])
def test_a_time_that_is_not_finite_is_left_out(time: str) -> None:
    line = json.loads(f'{{"allocated_bytes": 1, "time": {time}, "began": {time}}}')
    assert MemorySample.from_line(line) == MemorySample(allocated_bytes=1)


def test_cache_is_unknown_if_only_tensors_were_logged() -> None:
    assert MemorySample(allocated_bytes=5).cache_bytes is None
    assert MemorySample(allocated_bytes=5, reserved_bytes=7).cache_bytes == 2
    assert MemorySample().cache_bytes == 0
