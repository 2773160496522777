"""The summary of a run, and the trend of its rewards."""

from __future__ import annotations

import json
import math

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_client.run_directory.records import AttemptRecord, LedgerRecord, RestoreRecord, RewardStatistics
from rljob_client.run_directory.reward_trend import RewardTrend, reward_text, reward_trend
from rljob_client.run_directory.summary import PeakMemory, Summary, summarize
from rljob_memory.budget import budget
from rljob_memory.recovery.other_machine import plan_facts
from rljob_testing.memory_plans import memory_plan, memory_setup
from tests.unit.ledger.samples import GIB, plan_change_record, step_record


def attempt(number: int, started_at: float, resumed_from: int = 0) -> AttemptRecord:
    return AttemptRecord(attempt=number, started_at=started_at, resumed_from=resumed_from)


def summary_of(records: list[LedgerRecord], exit_code: ExitCode = ExitCode.COMPLETE) -> Summary:
    return summarize(records, job="digits", total_steps=12, exit_code=exit_code)


def test_rewards_tokens_and_phases_are_of_the_step_loop() -> None:
    steps: list[LedgerRecord] = [
        step_record(1, seconds={"rollout": 1.0, "update": 0.5}, total_seconds=2.0, tokens=100),
        step_record(2, reward=0.7, seconds={"rollout": 2.0, "checkpoint": 1.0}, total_seconds=3.0, tokens=400),
    ]
    summary = summary_of(steps)
    assert (summary.first_reward, summary.last_reward, summary.reward_window_steps) == (0.5, 0.7, 1)
    assert (summary.tokens, summary.tokens_per_second) == (500, 100.0)
    assert summary.step_seconds
    assert (summary.step_seconds.sum, summary.step_seconds.mean) == (5.0, 2.5)
    assert summary.seconds_by_phase["rollout"].sum == 3.0
    assert summary.seconds_by_phase["checkpoint"].mean == 0.5
    assert summary_of(steps[:1]).reward_trend is None


def test_peak_memory_is_the_highest_rank_and_phase_of_each_role() -> None:
    memory = {
        "policy-0": {"update": GIB, "sync": 3 * GIB},
        "policy-1": {"update": 4 * GIB},
        "rollout-0": {"rollout": 1},
    }
    summary = summary_of([step_record(1, memory_bytes=memory), step_record(2, memory_bytes={})])
    assert summary.peak_memory["policy"] == PeakMemory(gib=4.0, counts="device")
    assert set(summary.peak_memory) == {"policy", "rollout"}


def test_peaks_and_seconds_stand_next_to_those_of_the_last_plans_budget() -> None:
    setup, plan = memory_setup(), memory_plan()
    begun = attempt(1, 0.0).model_copy(
        update={"plan": plan.model_dump(mode="json", by_alias=True), "plan_facts": plan_facts(setup)}
    )
    step = step_record(1, memory_bytes={"policy-0": {"update": GIB}, "rollout-0": {"rollout": 2 * GIB}})
    predicted, summary = budget(setup, plan), summary_of([begun, step])
    peaks = {role: peak.predicted_gib for role, peak in summary.peak_memory.items()}
    assert peaks == {
        "policy": predicted.in_torch("policy", "update") / GIB,
        "rollout": predicted.in_torch("engine", "rollout") / GIB,
    }
    assert summary.predicted_seconds == predicted.seconds_by_phase
    changed = plan_change_record(2)
    assert summary_of([begun, changed, step]).predicted_seconds == budget(setup, changed.plan).seconds_by_phase
    for facts in ({}, plan_facts(memory_setup(device="cpu")), {"parameters": 7}):
        other = begun.model_copy(update={"plan_facts": facts})
        assert summary_of([other, step]).predicted_seconds == {}


def test_attempts_and_plan_changes_are_counted_once() -> None:
    records: list[LedgerRecord] = [
        attempt(1, started_at=0.0),
        plan_change_record(2),
        step_record(1, committed_at=50.0),
        plan_change_record(2, seconds=3.5),
        attempt(2, started_at=100.0, resumed_from=1),
        RestoreRecord(attempt=2, checkpoint_step=0, replayed_steps=1),
        step_record(2, attempt=2, committed_at=113.0, total_seconds=1.0),
        step_record(3, attempt=2, committed_at=114.0),
        attempt(3, started_at=200.0, resumed_from=3),
        RestoreRecord(attempt=3, checkpoint_step=1, replayed_steps=2),
        plan_change_record(3),
    ]
    summary = summary_of(records)
    assert summary.startup_seconds == 12.0, "from the start of the last attempt with a step to that step"
    assert (summary.attempts, summary.replayed_steps) == (3, 3)
    assert [(c.generation, c.seconds_to_recover) for c in summary.plan_changes] == [(2, 3.5), (3, None)]


@pytest.mark.parametrize(
    ("exit_code", "status"),
    [
        (ExitCode.COMPLETE, "Complete"),
        (ExitCode.TERMINATED, "Stopped"),
        (ExitCode.INTERRUPTED, "Stopped"),
        (ExitCode.DEVICE_OUT_OF_MEMORY, "Failed"),
    ],
)
def test_the_status_follows_from_the_exit_code(exit_code: ExitCode, status: str) -> None:
    summary = summary_of([step_record(1)], exit_code)
    assert (summary.status, summary.exit_code, summary.exit_reason) == (status, exit_code, exit_code.meaning)


def test_a_run_that_died_before_its_first_step_has_a_summary() -> None:
    reason = "no such file r\udce9sum"
    summary = summarize(
        [attempt(1, 0.0)], job="digits", total_steps=1, exit_code=ExitCode.BAD_INPUT, exit_reason=reason
    )
    written = json.loads(summary.to_json())
    assert written["exit_reason"] == r"no such file r\udce9sum"
    assert (written["steps"], written["exit_code"]) == (0, 84)
    assert written["first_reward"] is written["startup_seconds"] is written["truncated_ratio"] is None


def test_lost_work_is_summed_over_the_steps() -> None:
    lost = {"skipped_updates": 1.0, "dropped_tokens": 5.0, "skipped_tokens": 7.0, "reward_errors": 2.0}
    lost["empty_responses"] = 1.0
    summary = summary_of(
        [
            step_record(1, metrics=lost | {"uniform_groups": 1.0}),
            step_record(2, metrics=lost | {"loss": math.nan, "uniform_groups": 0.9}),
            step_record(3, metrics={}),
        ]
    )
    assert (summary.skipped_updates, summary.dropped_tokens, summary.skipped_tokens) == (2, 10, 14)
    assert (summary.reward_errors, summary.empty_responses) == (4, 2)
    assert (summary.steps_without_gradient, summary.truncated_ratio) == (1, 0.25)


LINEAR = [step / 10 for step in range(20)]


def trend(means: list[float], std: float = 0.1) -> RewardTrend | None:
    return reward_trend([RewardStatistics(mean=mean, std=std, min=0.0, max=1.0) for mean in means])


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        (LINEAR[:1], (None, 0.0, 1)),
        (LINEAR[:3], (0.0, 0.2, 1)),
        (LINEAR[:4], (0.05, 0.25, 2)),
        (LINEAR, (0.2, 1.7, 5)),
        ([math.nan, 0.1, math.inf, 0.3], (0.1, 0.3, 1)),
    ],
)
def test_windows_do_not_overlap(means: list[float], expected: tuple[float | None, float, int]) -> None:
    found = trend(means)
    assert found is not None
    assert (found.first, found.last, found.window_steps) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("means", "std", "verdict"),
    [
        (LINEAR[:1], 0.1, None),
        (LINEAR, 0.1, "rose"),
        (LINEAR[::-1], 0.1, "fell"),
        ([0.1] * 7, 0.0, "stayed"),
        ([0.0, 0.0], 0.0, "stayed"),
        ([0.25] * 5 + [0.5] * 5, 0.0, "rose"),
        ([0.171, 0.288, 0.240, 0.248], 0.1, "stayed"),
        ([0.03, 0.13, 0.00], 0.1, "stayed"),
        ([0.1, 0.9], 0.1, "rose"),
        ([0.1, 0.9], math.nan, "stayed"),
    ],
)
def test_a_difference_within_the_noise_is_no_trend(means: list[float], std: float, verdict: str | None) -> None:
    found = trend(means, std)
    assert found is not None
    assert found.verdict == verdict


def test_without_a_finite_reward_there_is_no_trend() -> None:
    assert trend([]) is trend([math.nan, math.inf]) is None


@pytest.mark.parametrize(("reward", "text"), [(0.0, "0.000"), (0.0604, "0.060"), (-2.5, "-2.500"), (3e-4, "0.0003")])
def test_a_small_reward_is_not_shown_as_zero(reward: float, text: str) -> None:
    assert reward_text(reward) == text
