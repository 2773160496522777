"""The summary of a run, and the numbers in it and on the display."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.exit_codes import ExitCode
from rljob_client.run_directory.records import AttemptRecord, LedgerRecord, RestoreRecord
from rljob_client.run_directory.summary import summarize
from rljob_memory.budget import budget
from rljob_memory.recovery.other_machine import plan_facts
from rljob_testing.memory_plans import memory_plan, memory_setup
from rljob_trainer.display.run_display import clock, evaluation_line, plain_console, short_seconds, sparkline
from rljob_trainer.display.summary_table import print_summary
from tests.unit.ledger.samples import evaluation_record, plan_change_record, step_record


def printed(records: list[LedgerRecord], exit_code: ExitCode, reason: str | None = None) -> str:
    text = io.StringIO()
    summary = summarize(records, job="digits", total_steps=12, exit_code=exit_code, exit_reason=reason)
    print_summary(summary, plain_console(text), Path("runs/digits"))
    return text.getvalue()


def test_it_shows_the_result_of_the_run() -> None:
    text = printed([step_record(step, reward=step / 10) for step in range(1, 11)], ExitCode.TERMINATED)
    rows = {line[:20].strip(): line[20:].strip() for line in text.splitlines()}
    assert "digits  Stopped  stopped by SIGTERM; the same command resumes the run" in text
    assert rows["steps"].endswith("10 of 12")
    assert "0.300 → 0.800" in text
    assert "1,000 tokens/s, 1.0 s a step" in text
    assert "60%  600 ms" in text
    assert "2.00 GiB  reserved by torch on its GPU" in text
    assert "runs/digits" in text


def test_it_compares_peaks_and_seconds_with_the_prediction() -> None:
    setup, plan = memory_setup(), memory_plan()
    begun = AttemptRecord(attempt=1, started_at=0.0, resumed_from=0, plan=plan.model_dump(mode="json", by_alias=True))
    text = printed(
        [
            begun.model_copy(update={"plan_facts": plan_facts(setup)}),
            step_record(1, memory_bytes={"policy-0": {"update": 2 << 30}}),
        ],
        ExitCode.COMPLETE,
    )
    predicted = budget(setup, plan).in_torch("policy", "update") / (1 << 30)
    assert f"2.00 GiB  reserved by torch on its GPU; {predicted:.2f} predicted" in text
    assert f"60%  600 ms  {short_seconds(budget(setup, plan).seconds('rollout'))} predicted" in text


def test_it_shows_the_last_and_the_best_evaluation() -> None:
    evaluations = [evaluation_record(0, 0.1), evaluation_record(2, 0.75), evaluation_record(4, 0.5, best=(2, 0.75))]
    text = printed([*map(step_record, range(1, 5)), *evaluations], ExitCode.COMPLETE)
    assert "0.500, best 0.750 (step 2)  reward_mean, 3 in 6.0 s" in text
    assert "evaluation" not in printed([step_record(1)], ExitCode.COMPLETE)
    assert evaluation_line(evaluations[1]) == (
        "evaluation after step 2  reward 0.750  pass@1 0.750  response 3.2 tokens  10 prompts × 1  2.0 s  best"
    )


@pytest.mark.parametrize(
    ("rewards", "row"),
    [
        ([0.3], "0.300  one step"),
        ([0.171, 0.288, 0.240, 0.248], "0.229 → 0.244  means of 2 steps, within the noise"),
        ([0.03, 0.13, 0.0], "0.030 → 0.000  single steps, within the noise"),
        ([0.0, 0.0, 0.9, 0.9], "0.000 → 0.900  means of 2 steps"),
    ],
)
def test_short_runs_show_rewards_of_steps_that_do_not_overlap(rewards: list[float], row: str) -> None:
    text = printed([step_record(step, reward) for step, reward in enumerate(rewards, start=1)], ExitCode.COMPLETE)
    [line] = [line for line in text.splitlines() if line.startswith("reward ")]
    assert line.removeprefix("reward").strip() == row


def test_a_run_with_more_steps_than_the_manifest_shows_its_steps() -> None:
    text = printed([step_record(step) for step in range(1, 21)], ExitCode.COMPLETE)
    assert "20 committed; algorithm.steps is 12" in text


def test_it_shows_lost_work_only_if_there_is_some() -> None:
    text = printed([step_record(1)], ExitCode.COMPLETE)
    assert "checkpoint" not in text, "a phase that took no time is left out"
    metrics = (
        "skipped_updates",
        "dropped_tokens",
        "skipped_tokens",
        "uniform_groups",
        "reward_errors",
        "empty_responses",
    )
    names = [name.replace("_", " ") for name in metrics]
    names[3:5] = ["without gradient", "failed rewards"]
    assert not any(name in text for name in names)
    lost = dict.fromkeys(metrics, 1.0) | {"dropped_tokens": 5000.0}
    text = printed([step_record(1, metrics=lost)], ExitCode.COMPLETE)
    assert all(name in text for name in names), text
    assert "5,000" in text
    assert "25% of the responses" in text


def test_it_shows_attempts_and_replayed_steps() -> None:
    records: list[LedgerRecord] = [
        AttemptRecord(attempt=1, started_at=0.0, resumed_from=0),
        step_record(1),
        AttemptRecord(attempt=2, started_at=10.0, resumed_from=1),
        RestoreRecord(attempt=2, checkpoint_step=0, replayed_steps=1),
    ]
    assert "1 of 12 in 2 attempts, 1 replayed" in printed(records, ExitCode.ERROR)


def test_a_run_without_a_step_claims_no_reward_and_no_speed() -> None:
    text = printed([], ExitCode.BAD_INPUT)
    assert "0 of 12" in text
    assert "reward " not in text.replace("reward function", "")
    assert "tokens/s" not in text


def test_it_shows_the_latest_changes_of_the_plan() -> None:
    changes: list[LedgerRecord] = [plan_change_record(generation, seconds=38.0) for generation in range(2, 9)]
    text = printed([step_record(1), *changes], ExitCode.COMPLETE)
    assert "2 earlier ones not shown" in text
    line = "microBatchTokens 4096 → 2048, after ActivationSpike at step 1, recovered in 38.0 s"
    assert " ".join(text.split()).count(line) == 5


def test_the_reason_is_printed_unchanged() -> None:
    reason = "cannot import nomod for nomod:ok: [red]no[/red]"
    assert reason in printed([], ExitCode.BAD_INPUT, reason)


# --- numbers ---


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        *zip(map(clock, (0.0, 59.6, 62.0, 3727.0, -1.0)), ("0:00", "1:00", "1:02", "1:02:07", "0:00"), strict=True),
        (short_seconds(0.0034), "3 ms"),
        (short_seconds(0.43), "430 ms"),
        (short_seconds(0.9997), "1.0 s"),
        (short_seconds(1.24), "1.2 s"),
        (short_seconds(125.0), "2:05 min"),
        (short_seconds(3725.0), "1:02:05 h"),
        (sparkline([0.0, 0.5, 1.0], width=10), "▁▅█"),
        (sparkline([0.0, 0.0, 1.0, 1.0, 0.0, 1.0], width=3), "▁█▅"),
        (sparkline([0.3, 0.3], width=5), "▁▁"),
    ],
)
def test_times_sizes_and_courses_are_short(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.lists(st.floats(min_value=-1e6, max_value=1e6) | st.just(math.nan)), st.integers(1, 30))
def test_a_sparkline_never_passes_its_width_nor_breaks_on_nan(values: list[float], width: int) -> None:
    finite = sum(math.isfinite(value) for value in values)
    assert len(sparkline(values, width)) == min(width, finite)
