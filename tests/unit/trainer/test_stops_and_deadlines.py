"""Deadlines of phases, the stacks of processes that exceed them, and requests to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.plan_change import Phase
from rljob_client.run_directory.records import StepRecord
from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_trainer.errors import PhaseDeadlineExceeded
from rljob_trainer.recovery.phase_deadlines import PhaseDeadlines, innermost_frame, with_stacks
from rljob_trainer.roles.time_limit import current_limit, time_limit
from rljob_trainer.runtime.stop_request import StopNow, stop_on_signals
from tests.unit.ledger.samples import step_record

HANGING = """
import ctypes, sys
from rljob_trainer.roles.time_limit import stacks_written_after

def all_reduce():
    ctypes.PyDLL(None).getchar()  # holds Python's lock until standard input ends

with stacks_written_after(float(sys.argv[1])):
    all_reduce()
"""
HANG = [sys.executable, "-c", HANGING]


def steps(phase: Phase, *seconds: float) -> list[StepRecord]:
    """Earlier steps, in which the phase took these times."""
    return [step_record(number, seconds={phase: taken}) for number, taken in enumerate(seconds, start=1)]


def test_the_first_run_of_a_phase_has_more_time_than_later_ones() -> None:
    limits = PhaseDeadlines(600, [])
    assert limits.limit_seconds("update") == 3600
    limits.done("update")
    assert limits.limit_seconds("update") == 600
    assert limits.limit_seconds("rollout") == 3600
    limits.forget()
    assert limits.limit_seconds("update") == 3600
    assert limits.limit_seconds(None) == 7200
    with PhaseDeadlines(0, []).limited("update"):
        assert current_limit() is None, "0 disables the limits"


WITH_OVERLAP = [step_record(n, seconds={"rollout": 1.0, "update": 900.0}) for n in (1, 2)]
"""The rollout overlaps the update, so its recorded time is only the wait; after a failure, it takes both times."""


@pytest.mark.parametrize(
    ("earlier", "phase", "overlapped", "seconds"),
    [
        (steps("update", 90, 100, 4000), "update", None, 1000),  # ten times the median
        (WITH_OVERLAP, "rollout", "rollout", 9010),
        (WITH_OVERLAP, "update", "update", 9010),
        (WITH_OVERLAP, "rollout", None, 600),
        ([], "rollout", "rollout", 3600),  # the first step generates the rollouts of two steps
        ([], "checkpoint", None, 3600),
        (steps("checkpoint", 900, 0), "checkpoint", None, 9000),  # ten times the slowest one
    ],
)
def test_a_phase_may_take_ten_times_its_usual_time(
    earlier: list[StepRecord], phase: Phase, overlapped: Phase | None, seconds: float
) -> None:
    limits = PhaseDeadlines(600, earlier, overlapped=overlapped)
    limits.done(phase)
    assert limits.limit_seconds(phase) == seconds


def test_an_inner_limit_replaces_the_outer_one() -> None:
    seen = []
    with time_limit(100):
        with time_limit(5):
            seen.append(current_limit())
        seen.append(current_limit())
    seen.append(current_limit())
    assert [limit and limit.seconds for limit in seen] == [5, 100, None]


def test_stacks_are_written_though_native_code_holds_the_lock(tmp_path: Path) -> None:
    log = tmp_path / "policy-0.log"
    deadline = Deadline(PATIENCE_SECONDS)
    with log.open("w") as file, subprocess.Popen([*HANG, "0.5"], stdin=subprocess.PIPE, stderr=file) as process:
        while not log.read_text().endswith(" in <module>\n") and not deadline.passed:
            time.sleep(0.05)
    assert process.returncode == 0
    failure = PhaseDeadlineExceeded("policy-0 did not finish updating").of("policy-0")
    explained = with_stacks(failure, tmp_path, ["policy-0", "rollout-0"], 7, "update")
    stacks = tmp_path / "stacks-step-7-update.txt"
    assert str(explained) == (
        f"policy-0 did not finish updating; it was in all_reduce (<string>:6). Stacks of policy-0: {stacks}"
    )
    assert explained.actor == "policy-0"
    assert "=== policy-0\nTimeout (" in stacks.read_text()
    in_time = subprocess.run([*HANG, "60"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    assert in_time.stderr == b"", "a process within its limit writes nothing"


def test_the_frame_is_that_of_the_thread_that_runs_the_role() -> None:
    dump = (
        "Timeout (0:10:00)!\nThread 0x1 (most recent call first):\n"
        '  File "/lib/threading.py", line 320 in wait\n\n'
        "Thread 0x2 (most recent call first):\n"
        '  File "/torch/distributed/distributed_c10d.py", line 2501 in all_reduce\n'
        '  File "/rljob_trainer/roles/actor.py", line 70 in call\n\n'
        "Thread 0x3 (most recent call first):\n"
        '  File "/lib/selectors.py", line 1 in select\n'
    )
    assert innermost_frame(dump) == "all_reduce (distributed_c10d.py:2501)"


@pytest.mark.parametrize("content", [None, "", "no stack here\n"])
def test_a_process_without_stacks_is_named_too(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "rollout-0.log").write_text(content)
    failure = PhaseDeadlineExceeded("rollout-0 did not finish generating").of("rollout-0")
    explained = with_stacks(failure, tmp_path, ["rollout-0"], 1, "rollout")
    assert str(explained) == "rollout-0 did not finish generating; it has written no stack"


def test_a_signal_lets_the_step_finish_and_a_second_one_stops_at_once() -> None:
    notes: list[str] = []
    with stop_on_signals(notes.append) as stop:
        with stop.at_once():
            stop.after_step()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.exit_code == ExitCode.TERMINATED
        assert stop, "between two attempts"
        with pytest.raises(StopNow):
            os.kill(os.getpid(), signal.SIGTERM)
    assert notes == ["SIGTERM: stopping after this step (a second signal stops at once)"]


def test_a_signal_during_start_up_stops_at_once() -> None:
    notes: list[str] = []
    with stop_on_signals(notes.append) as stop:
        with pytest.raises(StopNow), stop.at_once():
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.exit_code == ExitCode.INTERRUPTED
        with pytest.raises(StopNow), stop.at_once():
            pytest.fail("an attempt began after a request to stop")
    assert notes == ["SIGINT: stopping"]
