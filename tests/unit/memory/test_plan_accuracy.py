"""The draw of configurations, their schedule on GPUs, and the errors of recorded predictions and of those of today."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from rljob_testing.plan_accuracy.configurations import (
    ARMS,
    IN_SAMPLE,
    MISSING_SHARE,
    MOST_STEP_SECONDS,
    SPACE,
    described,
    drawn,
    planned,
)
from rljob_testing.plan_accuracy.errors import Row, compared_again, errors, statistics_of
from rljob_testing.plan_accuracy.page import pages, rows
from rljob_testing.plan_accuracy.schedule import GpuJob, in_order, next_job, run_jobs

RECORDED = rows()

# --- the draw ---


def test_a_draw_depends_on_its_seed_alone_and_grows_at_its_end() -> None:
    assert drawn(1, 5) == dict(list(drawn(1, 12).items())[:5])
    assert list(drawn(1, 5).values()) != list(drawn(2, 5).values())


def test_drawn_configurations_are_worth_their_time_and_cover_the_space() -> None:
    arms = drawn(3, 150)
    for arm in arms.values():
        setup, choice = planned(arm)
        assert choice.budget.seconds() <= MOST_STEP_SECONDS
        assert choice.missing_bytes <= MISSING_SHARE * setup.hardware.device_memory_bytes
    assert len({described(arm) for arm in arms.values()}) == len(arms)
    for name in ("gpus", "response_tokens", "prompt_tokens", "card_gib"):
        assert {getattr(arm, name) for arm in arms.values()} == SPACE[name].keys()
    assert {arm.model for arm in arms.values()} >= {"0.6b", "1.7b", "4b", "8b", "14b"}


def test_the_arms_of_the_table_fit_an_h100() -> None:
    assert all(planned(arm)[1].fits for arm in ARMS.values())
    assert {row["arm"] for row in RECORDED} >= IN_SAMPLE


# --- the schedule ---


def job(name: str, gpus: int, seconds: float, run: Any = None) -> GpuJob:
    return GpuJob(name, "model", gpus, seconds, run)


def test_the_widest_and_longest_job_that_has_gpus_model_and_time_is_next() -> None:
    waiting = in_order([job("short", 1, 10), job("long", 1, 90), job("wide", 4, 20)])
    assert [each.name for each in waiting] == ["wide", "long", "short"]
    ready = frozenset({"model"})
    for free, seconds_left, expected in ((4, 100, "wide"), (3, 100, "long"), (1, 50, "short"), (1, 5, None)):
        found = next_job(waiting, free, ready, seconds_left)
        assert (found and found.name) == expected
    assert next_job(waiting, 4, frozenset(), 100) is None


def test_jobs_share_the_gpus_and_a_failed_one_is_a_row() -> None:
    in_use: list[int] = []
    lock = threading.Lock()
    found: dict[str, Row] = {}

    def run(name: str, gpus: Sequence[int], most_seconds: float) -> Row:
        with lock:
            assert not set(gpus) & set(in_use), "a GPU is used by one job at a time"
            in_use.extend(gpus)
        assert most_seconds <= 20
        with lock:
            for gpu in gpus:
                in_use.remove(gpu)
        if name == "failing":
            raise ValueError(name)
        return {"arm": name, "gpus": len(gpus)}

    sizes = {"one": 1, "two": 2, "failing": 1, "four": 4, "another": 1}
    jobs = [job(name, gpus, 10, partial(run, name)) for name, gpus in sizes.items()]
    late = job("late", 1, 1000, partial(run, "late"))
    prepared: list[str] = []
    left = run_jobs([*jobs, late], range(4), 500, prepared.append, lambda each, row: found.update({each.name: row}))
    assert left == [late]
    assert prepared == ["model"]
    assert found.pop("failing") == {"arm": "failing", "exit_code": None, "reason": "ValueError('failing')"}
    assert {name: row["gpus"] for name, row in found.items()} == {name: sizes[name] for name in found}
    assert len(found) == 4


# --- errors ---


def test_errors_are_shares_of_the_measured_values() -> None:
    found = errors([0.97, 0.99, 1.0, *[1.1] * 16, 1.5])
    assert found == {
        "count": 20,
        "median": 0.1,
        "percentile_95": 0.1,
        "least_ratio": 0.97,
        "greatest_ratio": 1.5,
        "underestimates": 0.05,
    }


def row(arm: str, ratio: float, **values: Any) -> Row:
    known = {"exit_code": 0, "plan_changes": 0, "missing_bytes": 0, "drawn": False, "in_sample": False}
    phases = {"update": {"gpu": {"ratio": ratio}, "policy": {"ratio": 9.0}}}
    return {"arm": arm, "step_seconds": {"ratio": 1.0}, "phases": phases} | known | values


def test_a_plan_that_changed_predicts_nothing_and_counts_as_one_that_ran_out() -> None:
    found = statistics_of(
        [
            row("a", 1.0, drawn=True),
            row("b", 1.2),
            row("c", 3.0, plan_changes=1),
            row("d", 1.0, missing_bytes=1),
            {"arm": "e", "exit_code": 84, "plan_changes": 2, "reason": "no step was committed"},
        ]
    )
    every = found["all"]
    assert (every["configurations"], every["held"], every["memory"]["count"]) == (5, 3, 3)
    assert every["memory"]["greatest_ratio"] == 1.2, "torch's part is not counted twice"
    assert every["first_plans_that_ran_out"] == ["c", "e"]
    assert every["refused_and_ran"] == ["d"]
    assert every["failed"] == ["e"]
    assert (found["drawn"]["configurations"], "in_sample" in found) == (1, False)


# --- recorded jobs ---


def test_the_drawn_jobs_were_predicted_within_these_errors() -> None:
    found = statistics_of(RECORDED)["drawn"]
    assert (found["held"], found["first_plans_that_ran_out"], found["refused_and_ran"]) == (21, [], [])
    assert found["gpu"]["median"] <= 0.012
    assert found["gpu"]["percentile_95"] <= 0.102
    assert found["gpu"]["underestimates"] <= 0.02
    assert found["host"]["median"] <= 0.035


def test_the_predictions_of_today_are_as_accurate_as_documented() -> None:
    found = statistics_of([compared_again(each) for each in RECORDED])["all"]
    assert found["held"] >= 30
    assert found["memory"]["median"] <= 0.05
    assert found["memory"]["percentile_95"] <= 0.10
    assert found["memory"]["underestimates"] <= 0.03
    assert found["step_seconds"]["percentile_95"] <= 0.30


@pytest.mark.parametrize("each", RECORDED, ids=lambda each: str(each["arm"]))
def test_recorded_jobs_held_with_their_first_plan(each: Row) -> None:
    assert (each["exit_code"], each["plan_changes"]) == (0, 0)


def test_the_pages_have_the_recorded_values() -> None:
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, "write it: python -m bench.programs.plan_accuracy --page"
