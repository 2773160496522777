from __future__ import annotations

import json

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_client.run_directory.records import AttemptRecord, LedgerRecord, RestoreRecord
from rljob_client.run_directory.summary import PeakMemory, Summary, summarize
from tests.unit.ledger.samples import GIB, plan_change_record, step_record


def attempt(number: int, started_at: float, resumed_from: int = 0) -> AttemptRecord:
    return AttemptRecord(attempt=number, started_at=started_at, resumed_from=resumed_from)


def summary_of(records: list[LedgerRecord], exit_code: ExitCode = ExitCode.COMPLETE) -> Summary:
    return summarize(records, job="digits", total_steps=12, exit_code=exit_code)


def test_first_and_last_reward_are_means_of_five_steps() -> None:
    rewards = [0.0, 0.1, 0.2, 0.3, 0.4, 9.0, 9.0, 0.5, 0.6, 0.7, 0.8, 0.9]
    summary = summary_of([step_record(step, reward) for step, reward in enumerate(rewards, start=1)])
    assert summary.first_reward == pytest.approx(0.2)
    assert summary.last_reward == pytest.approx(0.7)
    assert summary.reward_window_steps == 5


def test_one_step_has_one_reward_and_no_trend() -> None:
    summary = summary_of([step_record(1, 0.3)])
    assert (summary.first_reward, summary.last_reward, summary.reward_window_steps) == (None, 0.3, 1)
    assert summary.reward_trend is None


def test_tokens_a_second_and_phases_are_of_the_step_loop() -> None:
    steps: list[LedgerRecord] = [
        step_record(1, seconds={"rollout": 1.0, "update": 0.5}, total_seconds=2.0, tokens=100),
        step_record(2, seconds={"rollout": 2.0, "checkpoint": 1.0}, total_seconds=3.0, tokens=400),
    ]
    summary = summary_of(steps)
    assert summary.tokens == 500
    assert summary.tokens_per_second == 100.0
    assert summary.step_seconds
    assert (summary.step_seconds.sum, summary.step_seconds.mean) == (5.0, 2.5)
    assert summary.seconds_by_phase["rollout"].sum == 3.0
    assert summary.seconds_by_phase["checkpoint"].mean == 0.5


def test_peak_memory_is_the_highest_rank_and_phase_of_each_role() -> None:
    memory = {
        "policy-0": {"update": GIB, "sync": 3 * GIB},
        "policy-1": {"update": 4 * GIB},
        "rollout-0": {"rollout": 1},
    }
    summary = summary_of([step_record(1, memory_bytes=memory), step_record(2, memory_bytes={})])
    assert summary.peak_memory["policy"] == PeakMemory(gib=4.0, counts="device")
    assert set(summary.peak_memory) == {"policy", "rollout"}


def test_startup_is_from_the_last_attempt_s_start_to_its_first_step() -> None:
    records: list[LedgerRecord] = [
        attempt(1, started_at=0.0),
        step_record(1, committed_at=50.0),
        attempt(2, started_at=100.0, resumed_from=1),
        RestoreRecord(attempt=2, checkpoint_step=0, replayed_steps=1),
        step_record(2, attempt=2, committed_at=113.0, total_seconds=1.0),
        step_record(3, attempt=2, committed_at=114.0),
        attempt(3, started_at=200.0, resumed_from=3),
        RestoreRecord(attempt=3, checkpoint_step=1, replayed_steps=2),
    ]
    summary = summary_of(records)
    assert summary.startup_seconds == 12.0
    assert summary.replayed_steps == 3
    assert summary.attempts == 3


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


def test_a_run_that_died_before_its_first_step_has_a_summary_of_valid_json() -> None:
    summary = summary_of([attempt(1, started_at=0.0)], ExitCode.BAD_INPUT)
    written = json.loads(summary.to_json())
    assert written["steps"] == 0
    assert written["first_reward"] is None
    assert written["startup_seconds"] is None
    assert written["exit_code"] == 84


def test_a_reason_with_bytes_that_are_no_text_is_written() -> None:
    reason = "no such file r\udce9sum"
    summary = summarize([], job="digits", total_steps=1, exit_code=ExitCode.ERROR, exit_reason=reason)
    assert json.loads(summary.to_json())["exit_reason"] == r"no such file r\udce9sum"


def test_each_plan_change_is_listed_once_with_its_effect() -> None:
    records: list[LedgerRecord] = [plan_change_record(2), step_record(1), plan_change_record(2, seconds=3.5)]
    summary = summary_of([*records, plan_change_record(3)])
    assert [(c.generation, c.seconds_to_recover) for c in summary.plan_changes] == [(2, 3.5), (3, None)]


def test_lost_work_is_summed_over_the_steps() -> None:
    lost = {
        "skipped_updates": 1.0,
        "dropped_tokens": 5.0,
        "skipped_tokens": 7.0,
        "reward_errors": 2.0,
        "empty_responses": 1.0,
    }
    steps: list[LedgerRecord] = [
        step_record(1, metrics=lost | {"uniform_groups": 1.0}),
        step_record(2, metrics=lost | {"loss": float("nan"), "uniform_groups": 0.9}),
        step_record(3, metrics={}),
    ]
    summary = summary_of(steps)
    assert (summary.skipped_updates, summary.dropped_tokens, summary.skipped_tokens) == (2, 10, 14)
    assert summary.empty_responses == 2
    assert (summary.reward_errors, summary.steps_without_gradient, summary.truncated_ratio) == (4, 1, 0.25)
    assert summary_of([]).truncated_ratio is None
