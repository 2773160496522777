"""A tracker never stops or delays a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from rljob_client.run_directory.samples import Sample
from rljob_testing.patience import eventually
from rljob_trainer.trackers.delivery import MOST_WAITING, Delivery
from rljob_trainer.trackers.tracker import Status, Tracker

SECRETS = {"WANDB_API_KEY": "0123456789abcdef", "HOME": "/root/home"}


class Recorded(Tracker):
    def __init__(self) -> None:
        self.logged: list[int] = []

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        self.logged.append(step)

    def samples(self, samples: Sequence[Sample], step: int) -> None: ...

    def note(self, title: str, text: str, step: int) -> None: ...

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None: ...


def delivery(open_tracker: Callable[[], Tracker]) -> tuple[Delivery, list[str]]:
    warnings: list[str] = []
    return Delivery("wandb", open_tracker, warnings.append, SECRETS), warnings


def log(step: int, tracker: Tracker) -> None:
    tracker.log({}, step, 0.0)


def soon() -> float:
    return time.monotonic() + 60.0


def test_calls_are_made_in_order_and_errors_cause_one_warning() -> None:
    tracker = Recorded()

    def fail(_tracker: Tracker) -> None:
        raise ConnectionError("lost the connection\nto https://me:word@host/?write_token=abc with 0123456789abcdef.")

    delivered, warnings = delivery(lambda: tracker)
    for step in (1, 2, 3):
        delivered.put(fail)
        delivered.put(partial(log, step))
    delivered.close(soon())
    assert tracker.logged == [1, 2, 3]
    assert warnings == [
        "the tracker wandb failed: ConnectionError: lost the connection to https://***@host/?*** with ***; "
        "training continues"
    ]


def test_a_tracker_that_cannot_be_opened_is_left_alone_after_one_warning() -> None:
    def refuse() -> Tracker:
        raise SystemExit("log in first")

    delivered, warnings = delivery(refuse)
    delivered.close(soon())
    for _ in range(2 * MOST_WAITING):
        delivered.put(lambda tracker: None)
    assert warnings == ["the tracker wandb failed: SystemExit: log in first; training continues"]


def test_a_tracker_that_hangs_causes_one_warning_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob_trainer.trackers.delivery.HANGS_AFTER_SECONDS", 0.0)
    begun, release = threading.Event(), threading.Event()

    def hang(_tracker: Tracker) -> None:
        begun.set()
        release.wait(60.0)

    delivered, warnings = delivery(Recorded)
    delivered.put(hang)
    assert begun.wait(60.0)

    def warned() -> list[str]:
        delivered.put(partial(log, 1))
        return warnings

    eventually(warned, "a warning")
    delivered.close(time.monotonic())
    release.set()
    assert warnings == ["the tracker wandb has not answered for 0 s; training continues"]


def test_calls_beyond_the_queue_are_dropped_with_one_warning() -> None:
    release, tracker = threading.Event(), Recorded()

    def open_late() -> Tracker:
        release.wait(60.0)
        return tracker

    delivered, warnings = delivery(open_late)
    for step in range(MOST_WAITING + 5):
        delivered.put(partial(log, step))
    release.set()
    delivered.close(soon())
    assert tracker.logged == list(range(MOST_WAITING))
    assert len(warnings) == 1
    assert "too slow" in warnings[0]


def test_closing_gives_up_at_its_deadline() -> None:
    release = threading.Event()

    def open_late() -> Tracker:
        release.wait(60.0)
        return Recorded()

    delivered, warnings = delivery(open_late)
    delivered.close(time.monotonic())
    release.set()
    assert warnings == [
        "the tracker wandb did not finish within 30 s: its last values may be missing; training continues"
    ]
