"""Calculations behind the plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from rljob_client.plot.learning_plot import draw_learning
from rljob_client.plot.memory_plot import MemoryPeaks, draw_memory, memory_peaks
from rljob_client.plot.memory_timeline import Band, Level, Moment, Timeline
from rljob_client.plot.reward_plot import band, running_mean, running_window
from rljob_client.plot.style import merge_lines, spread
from rljob_client.plot.timeline_plot import phase_shares, time_axis
from rljob_client.plot.timing_plot import axis_height, bar_edges, cut_bars, draw_timing, seconds_by_phase
from rljob_client.run_directory.records import ResponseStatistics
from tests.unit.ledger.samples import GIB, step_record


def test_the_line_is_the_mean_of_a_window_as_long_as_that_of_the_trend() -> None:
    values = np.array([0.0, 3.0, 6.0, 0.0, 9.0])
    np.testing.assert_allclose(running_mean(values, window=3), [0.0, 1.5, 3.0, 3.0, 5.0])
    assert [running_window(steps) for steps in (1, 3, 8, 10, 119, 400, 5000)] == [1, 1, 4, 5, 5, 20, 51]
    low, high = band(np.array([0.9]), np.array([0.3]), 0.0, 1.0)
    assert (low[0], high[0]) == (pytest.approx(0.6), 1.0), "the band stays within the observed rewards"


def test_the_phases_add_up_to_the_wall_time_of_each_step() -> None:
    steps = [step_record(1), step_record(2, seconds={"sync": 0.5}, total_seconds=0.75)]
    np.testing.assert_allclose(sum(seconds_by_phase(steps).values()), [1.0, 0.75])


@given(st.integers(1, 5000))
def test_bars_are_few_and_cover_every_step_once(steps: int) -> None:
    edges = list(bar_edges(steps))
    assert len(edges) - 1 <= 150
    assert [step for a, b in pairwise(edges) for step in range(a, b)] == list(range(steps))


def test_one_slow_step_does_not_flatten_the_others() -> None:
    assert axis_height(np.append(np.ones(100), 3.0)) > 3.0
    assert axis_height(np.append(np.ones(100), 50.0)) < 3.0
    steps = [step_record(number, total_seconds=50.0 if number == 8 else 1.0) for number in range(1, 101)]
    [axes] = draw_timing(steps).axes
    assert "↑ 50 s" in [text.get_text() for text in axes.texts]
    assert axes.get_ylim()[1] < 3.0
    assert cut_bars(np.array([1.0, 9.0, 7.0, 8.0, 6.0]), 2.0) == [1, 3, 2]
    assert cut_bars(np.ones(9), 2.0) == []


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0.001, 0.5))
def test_labels_keep_their_order_their_distance_and_the_range(heights: list[float], spacing: float) -> None:
    placed = spread(heights, spacing, bottom=0.0, top=1.0)
    in_order = sorted(range(len(heights)), key=heights.__getitem__)
    room = min(spacing, 1.0 / max(1, len(heights) - 1))
    assert all(-1e-9 <= height <= 1 + 1e-9 for height in placed)
    assert all(placed[b] - placed[a] >= room - 1e-9 for a, b in pairwise(in_order))
    assert spread([0.2, 0.8, 0.5], spacing=0.1, bottom=0.0, top=1.0) == [0.2, 0.8, 0.5], "there is enough space"


NAN = float("nan")


@pytest.mark.parametrize(
    ("lines", "merged"),
    [
        ({"a": [1, 1, 1], "b": [1, 1.01, 1], "c": [1, 2, 1]}, [["a", "b"], ["c"]]),
        ({"a": [1, 1, 1], "at some steps": [NAN, 1, 1]}, [["a", "at some steps"]]),
        ({"a": [1, 2, 3], "at the first step": [1, NAN, NAN]}, [["a"], ["at the first step"]]),
        ({"a": [1, NAN, NAN], "b": [NAN, 1, NAN], "nowhere": [NAN, NAN, NAN]}, [["a"], ["b"], ["nowhere"]]),
    ],
)
def test_lines_that_coincide_are_one_line(lines: dict[str, list[float]], merged: list[list[str]]) -> None:
    arrays = {name: np.array(values, np.float64) for name, values in lines.items()}
    assert [names for names, _ in merge_lines(arrays, tolerance=0.05)] == merged


def test_phases_with_the_same_peaks_have_one_label() -> None:
    same = {1: GIB, 2: 2 * GIB}
    figure = draw_memory(MemoryPeaks({"policy": {"update": same, "sync": same, "load": {0: GIB // 2}}}, "host"))
    [axes] = figure.axes
    assert [text.get_text() for text in axes.texts] == ["update, sync  2.00", "load  0.50"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "GiB")


# --- learning curves ---

METRICS = {"loss": 0.5, "ppo_kl": 0.0, "grad_norm": 1.0, "uniform_groups": 0.5, "importance_weight_mean": 1.0}


def panels(*metrics: dict[str, float]) -> tuple[str, dict[str, Axes]]:
    """Title of the learning curves of steps with these metrics, and their panels."""
    figure = draw_learning([step_record(step, metrics=METRICS | each) for step, each in enumerate(metrics, start=1)])
    return figure.texts[0].get_text(), {axes.get_title(loc="left"): axes for axes in figure.axes}


def test_each_metric_of_the_run_has_a_panel_with_title_and_units() -> None:
    _, found = panels({"kl": 0.1}, {"kl": 0.2}, {"kl": 0.3})
    of_every_run = {"response length", "clipped responses", "uniform groups", "importance weights"}
    assert found.keys() == {"loss", "KL divergence", "gradient norm"} | of_every_run, "no panel for absent metrics"
    assert all(axes.get_xlabel() == "step" and axes.get_ylabel() for axes in found.values())
    labels = [line.get_label() for line in found["KL divergence"].lines[1:]]
    assert labels == ["within the step", "from the initial model"]


def test_values_that_are_not_finite_are_gaps_with_a_mark() -> None:
    title, found = panels(*({"grad_norm": norm} for norm in (1.0, NAN, float("inf"), 2.0)))
    marks, line = found["gradient norm"].lines
    np.testing.assert_array_equal(np.asarray(line.get_ydata(), np.float64), [1.0, NAN, NAN, 2.0])
    np.testing.assert_array_equal(np.asarray(marks.get_xdata(), np.float64), [2, 3])
    assert "NaN or infinity in 2" in title


def test_steps_without_a_signal_are_counted_and_rounding_fills_no_panel() -> None:
    title, found = panels(*({"uniform_groups": 1.0, "importance_weight_mean": 1 + 1e-7 * step} for step in (1, 2)))
    assert "Learning curves of 2 steps: no learning signal in 2" in title
    low, high = found["importance weights"].get_ylim()
    assert high - low > 0.01


def test_a_run_whose_every_value_is_nan_is_drawn() -> None:
    response = ResponseStatistics(mean_tokens=NAN, max_tokens=0, clipped_ratio=NAN)
    draw_learning([step_record(1, response=response, metrics=dict.fromkeys(METRICS, NAN))])


# --- the time axis ---


def timeline(bands: Sequence[tuple[float, float, int, str]], begin: float, end: float) -> Timeline:
    moments = tuple(Moment(time, 1, "update", {"policy": Level(1, 1)}) for time in (begin, end))
    return Timeline("host", 0, ("policy",), moments, tuple(Band(*band) for band in bands), 0)


def test_a_start_up_and_a_pause_are_shortened_on_the_axis() -> None:
    axis = time_axis(timeline([(0, 50, 0, "load"), (100, 150, 1, "update"), (5000, 5050, 2, "update")], 0, 5050))
    assert axis.gaps == [(0, 100), (150, 5000)]
    np.testing.assert_allclose(np.diff(axis.at([0, 100, 150, 5000, 5050])), [6, 50, 6, 50])
    np.testing.assert_allclose(axis.times_at(axis.at([20, 120, 700, 5050])), [20, 120, 700, 5050])
    for bands in ([(0, 50, 0, "load")], [(1, 50, 1, "update"), (51, 90, 1, "sync")]):
        axis = time_axis(timeline(bands, 0, 90))
        assert axis.gaps == [], "without a step or a long gap the axis is the time"
        np.testing.assert_allclose(axis.at([0, 30, 90]), [0, 30, 90])


def test_the_strip_shows_the_share_of_each_phase() -> None:
    bands = [Band(0, 2, 1, "sync"), Band(1, 3, 1, "sync"), Band(6, 7, 2, "sync"), Band(3, 4, 1, "update")]
    np.testing.assert_allclose(phase_shares(bands, "sync", np.array([0.0, 4.0, 8.0])), [0.75, 0.25])
    np.testing.assert_allclose(phase_shares(bands, "rollout", np.array([0.0, 4.0])), [0.0])


def test_peaks_are_the_highest_of_all_ranks_and_micro_batches(tmp_path: Path) -> None:
    ledger = memory_peaks(tmp_path, [step_record(1)])
    assert ledger.by_role == {"policy": {"update": {1: GIB}}, "rollout": {"rollout": {1: 2 * GIB}}}, "without logs"
    for rank, peak in ((0, 3), (1, 4)):
        update = {"step": 1, "phase": "update", "device_total": 80 * GIB, "allocated": 0}
        sync = {"step": 2, "phase": "sync", "micro_batch": None, "device_total": 80 * GIB, "reserved": GIB}
        lines = [
            update | {"micro_batch": 0, "peak_reserved": peak * GIB},
            update | {"micro_batch": 1, "peak_reserved": GIB},
            sync | {"allocated": 0},
        ]
        (tmp_path / f"policy-{rank}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    peaks = memory_peaks(tmp_path, [step_record(1)])
    assert peaks.by_role == {"policy": {"update": {1: 4 * GIB}, "sync": {2: GIB}}}
    assert (peaks.counts, peaks.device_total_bytes) == ("device", 80 * GIB)
