from __future__ import annotations

import io
from pathlib import Path

from rljob_api.exit_codes import ExitCode
from rljob_trainer.display.run_display import plain_console
from rljob_trainer.display.summary_table import print_summary
from rljob_trainer.ledger.records import AttemptRecord, LedgerRecord, RestoreRecord
from rljob_trainer.ledger.summary import summarize
from tests.unit.ledger.samples import plan_change_record, step_record


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


def test_a_run_with_more_steps_than_the_manifest_is_explained() -> None:
    text = printed([step_record(step) for step in range(1, 14)], ExitCode.COMPLETE)
    assert "13 committed, more than algorithm.steps (12)" in text


def test_phases_that_took_no_time_are_left_out() -> None:
    assert "checkpoint" not in printed([step_record(1)], ExitCode.COMPLETE)


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
