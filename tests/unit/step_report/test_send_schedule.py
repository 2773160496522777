from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_trainer.step_report.schedule import INTERVAL_SECONDS, SendSchedule


def test_the_first_report_goes_at_once_and_the_next_after_the_interval() -> None:
    schedule = SendSchedule()
    assert schedule.wait_seconds(100.0, urgent=False) == 0
    schedule.succeeded(100.0)
    assert schedule.wait_seconds(101.0, urgent=False) == INTERVAL_SECONDS - 1
    assert schedule.wait_seconds(100.0 + INTERVAL_SECONDS, urgent=False) == 0


def test_an_urgent_report_does_not_wait_for_the_interval() -> None:
    schedule = SendSchedule()
    schedule.succeeded(100.0)
    assert schedule.wait_seconds(100.1, urgent=True) == 0


def test_after_failures_urgent_reports_back_off_up_to_a_minute() -> None:
    schedule = SendSchedule()
    waits = []
    for _ in range(8):
        schedule.failed(100.0)
        waits.append(schedule.wait_seconds(100.0, urgent=True))
    assert waits == [5, 10, 20, 40, 60, 60, 60, 60]
    schedule.succeeded(200.0)
    schedule.failed(200.0)
    assert schedule.wait_seconds(200.0, urgent=True) == 5, "a success resets the backoff"


def test_retry_after_of_the_api_server_is_respected() -> None:
    schedule = SendSchedule()
    schedule.failed(100.0, retry_after_seconds=90.0)
    assert schedule.wait_seconds(100.0, urgent=True) == 90


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 3.0), min_size=10, max_size=100))
def test_regular_reports_always_keep_their_interval(pauses: list[float]) -> None:
    schedule, now, sent = SendSchedule(), 0.0, []
    for pause in pauses:
        now += pause
        if schedule.wait_seconds(now, urgent=False) == 0:
            schedule.succeeded(now)
            sent.append(now)
    rounding = 1e-9
    assert all(later - earlier >= INTERVAL_SECONDS - rounding for earlier, later in pairwise(sent))
