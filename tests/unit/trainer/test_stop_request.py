from __future__ import annotations

import os
import signal

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_trainer.runtime.stop_request import StopNow, stop_on_signals


def test_a_signal_lets_the_step_finish_and_a_second_one_stops_at_once() -> None:
    notes: list[str] = []
    with stop_on_signals(notes.append) as stop:
        with stop.at_once():
            stop.after_step()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.exit_code == ExitCode.TERMINATED
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


def test_a_signal_between_attempts_is_remembered() -> None:
    with stop_on_signals(lambda _note: None) as stop:
        with stop.at_once():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
