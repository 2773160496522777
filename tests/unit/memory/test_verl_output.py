"""Steps of verl, from the lines that it prints."""

from __future__ import annotations

import pytest

from rljob_testing.verl_output import measured, metrics_of

PREFIX = "\x1b[36m(TaskRunnerV1 pid=4711)\x1b[0m "


def line(step: int, seconds: float) -> str:
    """In the form of `concat_dict_to_str` of verl 0.9.1: numbers as `pprint` prints them, behind Ray's prefix."""
    return (
        f"{PREFIX}step:{step} - actor/pg_loss:-1.5e-05 - actor/perf/max_memory_reserved_gb:2.5 - "
        f"training/num_turns/mean:np.float64(2.0) - training/last:True - "
        f"response_length/mean:1024.0 - response_length/min:1024.0 - response_length/max:1024.0 - "
        f"timing_s/gen:{seconds / 2} - timing_s/update_actor:{seconds / 4} - "
        f"timing_s/update_weights:0.5 - timing_s/step:{seconds} - timing_per_token_ms/gen:nan"
    )


def test_metrics_are_read_from_the_line_of_a_step() -> None:
    found = metrics_of(line(3, 8.0))
    assert found["timing_s/step"] == 8
    assert found["training/num_turns/mean"] == 2
    assert "training/last" not in found
    assert found["actor/pg_loss"] == -1.5e-05
    assert metrics_of(f"{PREFIX}Training Progress: 10%| - global step:1 -") == {}


def test_row_has_the_medians_of_steps_after_the_warm_up() -> None:
    printed = [
        (10.0, "Started a local Ray instance."),
        (99.0, "a step:1 - lr:1"),
        (100.0, line(1, 30.0)),
        (120.0, line(2, 19.0)),
    ]
    printed += [(131.0, line(3, 10.0)), (144.0, line(4, 12.0))]
    row = measured(printed, begun=5.0, responses=128)
    assert row["all_seconds"] == [30, 19, 10, 12]
    assert row["start_up_seconds"] == 65
    assert row["seconds_per_step"] == 11
    assert row["seconds_with_metrics"] == 12
    assert row["seconds_by_phase"] == {"rollout": 5.5, "log_probs": 0, "update": 2.75, "sync": 0.5}
    assert row["tokens_per_second"] == pytest.approx((128 * 1024 / 10 + 128 * 1024 / 12) / 2)
    assert row["torch_peak_reserved_bytes"] == 2.5 * 2**30


def test_run_that_ends_in_the_warm_up_has_its_seconds_only() -> None:
    assert measured([(9.0, line(1, 3.0))], begun=0.0, responses=8) == {"all_seconds": [3], "start_up_seconds": 6}
    assert measured([], begun=0.0, responses=8) == {"all_seconds": []}
