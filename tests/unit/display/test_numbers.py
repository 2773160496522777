from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.display.numbers import clock, gibibytes, short_seconds, sparkline


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0:00"), (59.6, "1:00"), (62.0, "1:02"), (3727.0, "1:02:07"), (-1.0, "0:00")]
)
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0034, "3 ms"),
        (0.43, "430 ms"),
        (0.9997, "1.0 s"),
        (1.24, "1.2 s"),
        (125.0, "2:05 min"),
        (3725.0, "1:02:05 h"),
    ],
)
def test_short_seconds(seconds: float, shown: str) -> None:
    assert short_seconds(seconds) == shown


def test_gibibytes() -> None:
    assert gibibytes(1.25 * 2**30) == "1.25 GiB"


def test_a_sparkline_goes_from_the_lowest_to_the_highest_value() -> None:
    assert sparkline([0.0, 0.5, 1.0], width=10) == "▁▅█"


def test_a_long_course_is_shown_in_the_given_width_by_means() -> None:
    assert sparkline([0.0, 0.0, 1.0, 1.0, 0.0, 1.0], width=3) == "▁█▅"


def test_a_level_course_is_level() -> None:
    assert sparkline([0.3, 0.3], width=5) == "▁▁"


@given(st.lists(st.floats(min_value=-1e6, max_value=1e6) | st.just(math.nan)), st.integers(1, 30))
def test_a_sparkline_never_passes_its_width_nor_breaks_on_nan(values: list[float], width: int) -> None:
    finite = sum(math.isfinite(value) for value in values)
    assert len(sparkline(values, width)) == min(width, finite)
