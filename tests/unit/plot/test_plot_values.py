"""Calculations behind the plots."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.plot.memory_samples import memory_peaks
from rljob_trainer.plot.reward_plot import band, running_mean, running_window
from rljob_trainer.plot.style import spread
from rljob_trainer.plot.timing_plot import axis_height, bar_edges, cut_bars, draw_timing, seconds_by_phase
from tests.unit.ledger.samples import GIB, step_record


def test_the_running_mean_is_of_the_last_values_and_of_fewer_at_the_start() -> None:
    values = np.array([0.0, 3.0, 6.0, 0.0, 9.0])
    np.testing.assert_allclose(running_mean(values, window=3), [0.0, 1.5, 3.0, 3.0, 5.0])


@given(st.integers(1, 5000))
def test_the_window_is_between_five_and_fifty_one_steps(steps: int) -> None:
    assert 5 <= running_window(steps) <= 51


def test_the_band_stays_within_the_observed_rewards() -> None:
    low, high = band(np.array([0.9]), np.array([0.3]), np.array([0.0]), np.array([1.0]))
    assert low[0] == pytest.approx(0.6)
    assert high[0] == 1.0


def test_the_phases_add_up_to_the_wall_time_of_each_step() -> None:
    steps = [step_record(1), step_record(2, seconds={"sync": 0.5}, total_seconds=0.75)]
    np.testing.assert_allclose(sum(seconds_by_phase(steps).values()), [1.0, 0.75])


@given(st.integers(1, 5000))
def test_bars_are_few_and_cover_every_step_once(steps: int) -> None:
    edges = list(bar_edges(steps))
    assert len(edges) - 1 <= 150
    assert [step for a, b in pairwise(edges) for step in range(a, b)] == list(range(steps))


def test_one_slow_step_does_not_flatten_the_others() -> None:
    steady = np.ones(100)
    assert axis_height(np.append(steady, 3.0)) > 3.0
    assert axis_height(np.append(steady, 50.0)) < 3.0


def test_bars_that_do_not_fit_are_marked_with_their_seconds() -> None:
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


def test_labels_with_enough_space_stay_at_their_lines() -> None:
    assert spread([0.2, 0.8, 0.5], spacing=0.1, bottom=0.0, top=1.0) == [0.2, 0.8, 0.5]


def test_peaks_are_the_highest_of_all_ranks_and_micro_batches(tmp_path: Path) -> None:
    for rank, peak in ((0, 3), (1, 4)):
        lines = [
            {"step": 1, "phase": "update", "micro_batch": 0, "device_total": 80 * GIB, "peak_reserved": peak * GIB},
            {"step": 1, "phase": "update", "micro_batch": 1, "device_total": 80 * GIB, "peak_reserved": GIB},
            {"step": 2, "phase": "sync", "micro_batch": None, "device_total": 80 * GIB, "reserved": GIB},
        ]
        (tmp_path / f"policy-{rank}.jsonl").write_text(
            "".join(json.dumps({"allocated": 0, **line}) + "\n" for line in lines)
        )
    peaks = memory_peaks(tmp_path, [step_record(1)])
    assert peaks.by_role == {"policy": {"update": {1: 4 * GIB}, "sync": {2: GIB}}}
    assert (peaks.counts, peaks.device_total_bytes) == ("device", 80 * GIB)


def test_without_logs_the_ledger_is_used(tmp_path: Path) -> None:
    peaks = memory_peaks(tmp_path / "memory", [step_record(1)])
    assert peaks.by_role == {"policy": {"update": {1: GIB}}, "rollout": {"rollout": {1: 2 * GIB}}}
