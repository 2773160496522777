"""Calculations behind the charts of a report."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_client.report.charts import (
    MOST_POINTS,
    learning_charts,
    peak_charts,
    rounded,
    running_mean,
    running_window,
    seconds_by_phase,
    seconds_chart,
    thinned,
)
from rljob_client.report.memory_timeline import Level, Moment, Timeline
from rljob_client.report.samples_section import spread
from rljob_client.report.timeline_chart import Clock, clock_of, timeline_chart
from tests.unit.ledger.samples import GIB, step_record


def test_the_line_is_the_mean_of_a_window_as_long_as_that_of_the_trend() -> None:
    assert running_mean([0.0, 3.0, 6.0, 0.0, 9.0], window=3) == [0.0, 1.5, 3.0, 3.0, 5.0]
    assert running_mean([], window=1) == []
    assert [running_window(steps) for steps in (1, 3, 8, 10, 119, 400, 5000)] == [1, 1, 4, 5, 5, 20, 51]


def test_the_phases_add_up_to_the_wall_time_of_each_step() -> None:
    steps = [step_record(1), step_record(2, seconds={"sync": 0.5}, total_seconds=0.75)]
    assert [sum(each) for each in zip(*seconds_by_phase(steps).values(), strict=True)] == pytest.approx([1.0, 0.75])


@pytest.mark.parametrize("steps", [1, 300, 301, 2000])
def test_bars_are_few_and_their_means_count_every_step(steps: int) -> None:
    chart = seconds_chart([step_record(step) for step in range(1, steps + 1)])
    rollout = next(trace for trace in chart.traces if trace["name"] == "rollout")
    assert len(rollout["x"]) <= 300
    assert set(rollout["y"]) == {0.6}
    assert ("Mean seconds" in chart.note) is (steps > 300)


@given(st.lists(st.none() | st.floats(), min_size=1, max_size=20), st.integers(1, 1000))
def test_long_lines_keep_their_highest_and_lowest_value(some: list[float | None], repeated: int) -> None:
    values = some * repeated
    xs, ys = thinned(range(len(values)), values)
    assert len(xs) == len(ys) <= MOST_POINTS
    assert list(xs) == sorted(xs)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    kept = [value for value in ys if value is not None and math.isfinite(value)]
    assert (max(finite, default=0), min(finite, default=0)) == (max(kept, default=0), min(kept, default=0))


def test_values_that_are_not_finite_are_gaps_and_counted() -> None:
    assert rounded([math.nan, math.inf, None, 1 / 3]) == [None, None, None, 0.333333]
    steps = [step_record(step, metrics={"loss": math.nan if step == 2 else 1.0}) for step in (1, 2, 3)]
    loss = next(chart for chart in learning_charts(steps, []) if chart.title == "Loss")
    assert loss.traces[0]["y"] == [1.0, None, 1.0]
    assert "NaN or infinite in 1 steps" in loss.note
    titles = {chart.title for chart in learning_charts(steps, [])}
    assert {"Reward", "Loss", "Response length"} <= titles
    assert "Entropy" not in titles, "no value"


def test_the_peak_of_a_phase_is_that_of_the_highest_rank() -> None:
    memory = {"policy-0": {"update": GIB}, "policy-1": {"update": 3 * GIB, "sync": GIB}}
    [chart] = peak_charts([step_record(1, memory_bytes=memory)])
    assert chart.title == "Peak memory by phase: policy"
    assert {trace["name"]: trace["y"] for trace in chart.traces} == {"update": [3.0], "sync": [1.0]}


def test_pauses_without_a_process_take_no_time_on_the_axis() -> None:
    clock = Clock(0.0, [(60.0, 3660.0), (3720.0, 7320.0)])
    assert [clock.at(time) for time in (0, 60, 1000, 3660, 3720, 5000, 7380)] == [0, 1, 1, 1, 2, 2, 3]


def level(gib: int) -> dict[str, Level]:
    return {"policy": Level(gib * GIB, gib * GIB)}


def test_long_timelines_keep_their_fullest_moment() -> None:
    moments = [Moment(float(second), 1, "update", level(5 + 50 * (second == 7777))) for second in range(20_000)]
    moments.insert(10_000, Moment(9999.5, 0, "", {}))
    timeline = Timeline("device", 0, ("policy",), tuple(moments), (), 80 * GIB)
    chart = timeline_chart(timeline, [], [])
    [layer] = chart.traces
    assert len(layer["x"]) <= 5000
    assert max(layer["y"]) == 55.0
    assert "drawn by the fullest of each stretch" in chart.note
    assert clock_of(timeline).pauses == [], "half a second"


def test_the_limit_is_drawn_if_memory_comes_near_it() -> None:
    def shapes(gib: int) -> int:
        timeline = Timeline("device", 0, ("policy",), (Moment(0.0, 1, "update", level(gib)),), (), 80 * GIB)
        return len(timeline_chart(timeline, [], []).layout["shapes"])

    assert (shapes(70), shapes(5)) == (1, 0)


@given(st.lists(st.integers(), max_size=50, unique=True), st.integers(2, 10))
def test_a_spread_has_the_first_and_the_last(items: list[int], most: int) -> None:
    chosen = spread(items, most)
    assert len(chosen) == min(len(items), most)
    assert chosen[:1] + chosen[-1:] == items[:1] + items[-1:]
    assert [item for item in items if item in chosen] == chosen
