from __future__ import annotations

import select
import subprocess
import sys

import pytest

from rljob_testing import patience
from rljob_testing.patience import Deadline, wait_for_end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """`now`, and the stolen time of each processor."""
    times = {"now": [100.0], "stolen": [7.0, 3.0]}
    monkeypatch.setattr("rljob_testing.patience.time.monotonic", lambda: times["now"][0])
    monkeypatch.setattr(patience, "_stolen_seconds", lambda: list(times["stolen"]))
    return times


def test_a_deadline_does_not_count_stolen_time(clock: dict[str, list[float]]) -> None:
    deadline = Deadline(10)
    clock["now"] = [110.5]
    assert deadline.passed
    clock["stolen"] = [8.0, 3.0]
    assert not deadline.passed
    clock["now"] = [111.5]
    assert deadline.passed


def test_stolen_seconds_only_grow() -> None:
    before = patience._stolen_seconds()
    assert before
    assert all(now >= then for now, then in zip(patience._stolen_seconds(), before, strict=True))


def test_a_process_that_does_not_end_is_reported_with_its_output() -> None:
    program = "import time; print('at work', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        select.select([process.stdout], [], [])  # until it has printed
        with pytest.raises(AssertionError, match=r"not ended after 0\.5 s:\nat work"):
            wait_for_end(process, 0.5)
        process.kill()
