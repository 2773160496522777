from __future__ import annotations

import io
import os
import re
import signal
from types import SimpleNamespace

import pytest
from rich.console import Console
from typing_extensions import Buffer

from rljob_api.exit_codes import ExitCode
from rljob_trainer.display import run_display
from rljob_trainer.display.run_display import RunDisplay, remaining_seconds, step_line
from rljob_trainer.runtime.stop_request import StopNow, stop_on_signals
from tests.unit.ledger.samples import step_record

STEPS = [step_record(step, reward=step / 10) for step in range(1, 9)]


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The elapsed time is always 0:00."""
    monkeypatch.setattr(run_display, "time", SimpleNamespace(monotonic=lambda: 100.0))


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def shown(console: Console) -> str:
    """Output of the console, without the codes that move the cursor."""
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def test_a_file_gets_one_line_a_step_and_no_control_codes() -> None:
    console = Console(file=io.StringIO(), width=40)
    with RunDisplay(console, "digits", total_steps=10) as display:
        display.phase("starting Ray")
        display.step(STEPS[0])
        display.step(STEPS[1])
        display.warning("the checkpoint of step 10 is not used: [weights] is missing")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "0:00  starting Ray …",
        "step  1/10  reward 0.100  loss 0.25  response 3.2 tokens  1,000 tokens/s  peak 2.00 GiB (rollout)  1.0 s",
        "step  2/10  reward 0.200  loss 0.25  response 3.2 tokens  1,000 tokens/s  peak 2.00 GiB (rollout)  1.0 s",
        "warning: the checkpoint of step 10 is not used: [weights] is missing",
    ]


def test_a_terminal_shows_progress_and_the_phase_until_the_next_step() -> None:
    console = terminal()
    with RunDisplay(console, "digits", total_steps=10) as display:
        display.phase("starting the engine")
        assert "starting the engine" in shown(console)
        display.step(STEPS[0])
        before = len(shown(console))  # until the step, a thread may show the phase again at any moment
        for step in STEPS[1:]:
            display.step(step)
        assert "2/10" in shown(console)[before:]
        assert "starting the engine" not in shown(console)[before:]
    last = shown(console).splitlines()[-2:]
    assert re.fullmatch(r"digits  ━+[╸╺]? +8/10  0:00  0:02 left\s*", last[0])
    assert last[1].rstrip() == (
        "reward 0.800 ▁▂▃▄▅▆▇█  1.0 s a step  response 3.2 tokens  1,000 tokens/s  peak 2.00 GiB (rollout)"
    )


UNIFORM = {"uniform_groups": 1.0}


@pytest.mark.parametrize(
    ("width", "metrics", "line"),
    [
        (80, {}, "reward 0.800 ▁▂▃▄▅▆▇█▁▂▃▄▅▆▇█  1.0 s a step  response 3.2 tokens  1,000 tokens/s"),
        (60, {}, "reward 0.800 ▁▂▃▄▅▆▇█▁▂▃▄  1.0 s a step  response 3.2 tokens"),
        (40, {}, "reward 0.800 ▁▂▃▄▅▆▇█  1.0 s a step"),
        (80, UNIFORM, "reward 0.800 ▁▂▃▄▅▆▇█▁▂▃▄▅▆  no learning signal: all rewards equal  1.0 s a step"),
        (12, {}, "reward 0.80…"),
    ],
)
def test_no_line_is_cut_where_a_part_can_be_left_out(width: int, metrics: dict[str, float], line: str) -> None:
    console = terminal(width)
    steps = [step_record(step, reward=(step % 8 + 1) / 10, metrics=metrics) for step in range(8, 8 + 24)]
    with RunDisplay(console, "digits", total_steps=100, committed=steps) as display:
        display.phase("starting the engine")
    assert max(len(line) for line in shown(console).splitlines()) <= width
    shown_line = shown(console).splitlines()[-1].rstrip()
    assert re.sub("[▁-█]+", "▁", shown_line) == re.sub("[▁-█]+", "▁", line)


def test_a_step_shows_its_learning_figures_and_what_it_lacks() -> None:
    metrics = {"loss": 0.25, "ppo_kl": 0.5, "kl": 0.0123, "grad_norm": float("nan"), "reward_errors": 3.0, **UNIFORM}
    line = step_line(step_record(1, metrics=metrics), total_steps=1)
    assert "reward 0.500  no learning signal: all rewards equal  3 failed rewards" in line
    assert "loss 0.25  KL 0.0123  grad norm nan" in line
    assert "peak" in line
    assert "peak" not in step_line(step_record(1, memory_bytes={}), total_steps=1)


@pytest.mark.parametrize(("total", "fraction"), [(10, "3/10"), (2, None)])
def test_a_resumed_run_starts_with_the_committed_steps(total: int, fraction: str | None) -> None:
    console = terminal()
    with RunDisplay(console, "digits", total_steps=total, committed=STEPS[:3]):
        pass
    assert "reward 0.300" in shown(console)
    assert fraction in shown(console) if fraction else "3/2" not in shown(console)


@pytest.mark.parametrize("text", ["SIGTERM: stopping after this step", "[bold] is not markup"])
def test_a_note_is_shown_unchanged_next_to_the_progress(text: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system="standard")
    with RunDisplay(console, "digits", total_steps=10, committed=STEPS) as display:
        display.note(text)
        display.warning(text)
    assert text in shown(console)
    assert f"warning: {text}" in shown(console)
    assert "[/]" not in shown(console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("\x1b[33m") == 1, "a warning does not color the progress"


def test_the_remaining_time_follows_the_last_ten_steps() -> None:
    slow = [step_record(step, total_seconds=60.0) for step in range(1, 11)]
    fast = [step_record(step, total_seconds=2.0) for step in range(11, 21)]
    assert remaining_seconds(slow + fast, total_steps=25) == 10.0


class InterruptedPipe(io.RawIOBase):
    """Standard output of a process that gets a signal in the middle of its first write."""

    def __init__(self) -> None:
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        first = not self.written
        self.written += bytes(data)
        if first:
            os.kill(os.getpid(), signal.SIGINT)
        return len(bytes(data))


def interrupted_display(pipe: InterruptedPipe) -> RunDisplay:
    return RunDisplay(Console(file=io.TextIOWrapper(io.BufferedWriter(pipe)), width=80), "digits", total_steps=10)


def test_a_signal_within_a_write_is_shown_after_it_or_stops_at_once() -> None:
    pipe = InterruptedPipe()
    with interrupted_display(pipe) as display, stop_on_signals(display.note) as stop:
        display.phase("starting the policy")
    assert stop.exit_code == ExitCode.INTERRUPTED
    assert pipe.written.decode().splitlines() == [
        "0:00  starting the policy …",
        "SIGINT: stopping after this step (a second signal stops at once)",
    ]
    pipe = InterruptedPipe()
    display = interrupted_display(pipe)
    with display, stop_on_signals(display.note) as stop, pytest.raises(StopNow), stop.at_once():
        display.phase("starting the policy")
    assert pipe.written.decode().splitlines()[-1] == "SIGINT: stopping"
