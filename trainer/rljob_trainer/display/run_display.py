"""Progress of a run: two updating lines on a terminal, otherwise one line per step."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rljob_client.run_directory.records import EvaluationRecord, StepRecord
from rljob_client.run_directory.reward_trend import reward_text
from rljob_client.run_directory.samples import Sample
from rljob_client.show_command import sample_view
from rljob_memory.sizes import human_bytes

_SPARKLINE_WIDTH = 20
_SHORTEST_SPARKLINE = 8
_PACE_WINDOW_STEPS = 10
_NO_SIGNAL = "no learning signal: all rewards equal"
_MOST_SAMPLES, _MOST_SAMPLE_LINES = 2, 6
"""Samples that are shown at once, and lines of each text."""
_LEARNING = {"loss": ("loss",), "KL": ("kl", "ppo_kl"), "grad norm": ("grad_norm",)}
"""Labels in the line of a step. The value is the first of these metrics that the step has."""


def plain_console(file: TextIO | None = None, *, quiet: bool = False) -> Console:
    """A console that prints text as it is: no emoji for `:name:`, no colors for numbers and paths. If `quiet`, it
    prints nothing."""
    return Console(file=file, emoji=False, highlight=False, quiet=quiet)


class RunDisplay:
    """Shows the current phase and each committed step. Notes and warnings stay on the screen.

    May be used by signal handlers and by other threads.
    """

    def __init__(self, console: Console, job: str, total_steps: int, committed: Sequence[StepRecord] = ()) -> None:
        """`committed`: the steps of earlier attempts, which count as progress."""
        self._console = console
        self._job = job
        self._total_steps = total_steps
        self._steps = list(committed)
        self._spinner: Spinner | None = None
        self._started = time.monotonic()
        self._live: Live | None = None
        self._lock = threading.RLock()
        self._waiting: deque[Callable[[], None]] = deque()
        """Writes of signal handlers that interrupted a write of the same thread."""
        self._writing = False

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._console.is_terminal:
            # The standard streams are redirected to the log: rich must not bring them back to the screen.
            self._live = Live(
                console=self._console,
                get_renderable=self._lines,
                refresh_per_second=8,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._spinner = None
        if self._live:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Show the current activity, such as "starting the engine", until the next `phase` or `step`."""
        if self._live:
            self._spinner = Spinner("dots", Text(text), style="cyan")
            self._write(self._live.refresh)
        else:
            self._print(f"{clock(self._elapsed_seconds)}  {text} …")

    def step(self, record: StepRecord) -> None:
        """Show a committed step."""
        self._steps.append(record)
        self._spinner = None
        if self._live:
            self._write(self._live.refresh)
        else:
            self._print(step_line(record, self._total_steps))

    def evaluation(self, record: EvaluationRecord) -> None:
        """Show an evaluation."""
        self._spinner = None
        self._print(evaluation_line(record))

    def samples(self, samples: Sequence[Sample]) -> None:
        """Show the first of the samples, with the start and the end of each text."""
        view = sample_view(samples[:_MOST_SAMPLES], self._console.width, _MOST_SAMPLE_LINES)
        self._write(lambda: self._console.print(view))

    def note(self, text: str) -> None:
        self._print(text)

    def warning(self, text: str) -> None:
        self._print(f"warning: {text}", style="yellow")

    # --- internals ---

    @property
    def _elapsed_seconds(self) -> float:
        return time.monotonic() - self._started

    def _print(self, text: str, style: str = "") -> None:
        # Without a terminal, a message stays on one line, whatever its length.
        self._write(lambda: self._console.print(Text(text, style), soft_wrap=self._live is None))

    def _write(self, write: Callable[[], None]) -> None:
        """Call `write`. If it interrupts another write of the same thread, it is called after that one.

        Python's streams refuse a write by a signal handler while the interrupted code is writing to the same stream.
        """
        with self._lock:
            self._waiting.append(write)
            if self._writing:
                return
            self._writing = True
            try:
                self._write_waiting()
            except BaseException:  # also one that a signal handler raised in the middle of a write
                self._write_waiting()
                raise
            finally:
                self._writing = False

    def _write_waiting(self) -> None:
        while self._waiting:
            self._waiting.popleft()()

    def _lines(self) -> RenderableType:
        lines: list[RenderableType] = [self._progress_line()]
        if self._steps:
            lines.append(_latest_line(self._steps, self._console.width))
        if self._spinner:
            lines.append(self._spinner)
        return Group(*lines)

    def _progress_line(self) -> RenderableType:
        done = len(self._steps)
        line = Table.grid(padding=(0, 2), expand=True)
        for _ in range(4):
            line.add_column(no_wrap=True)
        line.columns[1].ratio = 1
        left = f"  {clock(remaining_seconds(self._steps, self._total_steps))} left" if done else ""
        line.add_row(
            Text(self._job, "bold"),
            ProgressBar(total=self._total_steps, completed=done, complete_style="cyan", finished_style="green"),
            # A manifest may ask for fewer steps than are committed.
            Text.assemble((str(done), "bold"), f"/{self._total_steps}" if done <= self._total_steps else ""),
            Text(f"{clock(self._elapsed_seconds)}{left}", "dim"),
        )
        return line


def step_line(record: StepRecord, total_steps: int) -> str:
    """One line of text for a committed step."""
    digits = len(str(total_steps))
    found = {name: [record.metrics[key] for key in keys if key in record.metrics] for name, keys in _LEARNING.items()}
    parts = [
        f"step {record.step:>{digits}}/{total_steps}",
        f"reward {reward_text(record.reward.mean)}",
        *_remarks(record),
        *(f"{name} {values[0]:.3g}" for name, values in found.items() if values),
        f"response {record.response.mean_tokens:.1f} tokens",
        f"{record.tokens_per_second:,.0f} tokens/s",
        *_peak(record),
        short_seconds(record.total_seconds),
    ]
    return "  ".join(parts)


def evaluation_line(record: EvaluationRecord) -> str:
    """One line of text for an evaluation."""
    metrics, best = record.metrics, record.best
    names = [name for name in metrics if name.startswith("pass@")]
    parts = [
        f"evaluation after step {record.step}",
        f"reward {reward_text(metrics['reward_mean'])}",
        *(f"{name} {metrics[name]:.3f}" for name in dict.fromkeys((*names[:1], *names[-1:]))),
        f"response {metrics['response_mean_tokens']:.1f} tokens",
        f"{record.prompts:,} prompts × {record.samples_per_prompt}",
        short_seconds(record.seconds),
        *(["best"] if best is not None and best.step == record.step else []),
    ]
    return "  ".join(parts)


def remaining_seconds(steps: Sequence[StepRecord], total_steps: int) -> float:
    """Estimated seconds until the end, from the last ten steps. `steps` has at least one."""
    recent = [step.total_seconds for step in steps[-_PACE_WINDOW_STEPS:]]
    return (total_steps - steps[-1].step) * sum(recent) / len(recent)


def _latest_line(steps: Sequence[StepRecord], width: int) -> Text:
    """The latest step within `width` columns: what does not fit is left out, the least important first."""
    latest = steps[-1]
    reward, remarks = reward_text(latest.reward.mean), "".join(f"  {remark}" for remark in _remarks(latest))
    others = ""
    room = width - len(f"reward {reward} {remarks}") - _SHORTEST_SPARKLINE
    for part in (
        f"{short_seconds(latest.total_seconds)} a step",
        f"response {latest.response.mean_tokens:.1f} tokens",
        f"{latest.tokens_per_second:,.0f} tokens/s",
        *_peak(latest),
    ):
        if len(f"{others}  {part}") > room:
            break
        others += f"  {part}"
    width = max(1, min(_SPARKLINE_WIDTH, _SHORTEST_SPARKLINE + room - len(others)))
    bars = sparkline([step.reward.mean for step in steps], width)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("reward ").append(f"{reward} ", "bold green").append(bars, "green")
    return line.append(remarks, "yellow").append(others)


def _remarks(record: StepRecord) -> list[str]:
    """Facts about a step that should not be overlooked."""
    failed = record.metrics.get("reward_errors", 0.0)
    return [_NO_SIGNAL] * record.has_no_signal + [f"{failed:.0f} failed rewards"] * (failed > 0)


def _peak(record: StepRecord) -> list[str]:
    """The role with the highest memory peak of this step; empty if memory was not measured."""
    peaks = record.peak_memory_bytes
    if not peaks:
        return []
    role = max(peaks, key=peaks.__getitem__)
    return [f"peak {human_bytes(peaks[role])} ({role})"]


_BARS = "▁▂▃▄▅▆▇█"


def clock(seconds: float) -> str:
    """`0:38`, `1:02:07`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short_seconds(seconds: float) -> str:
    """`430 ms`, `1.2 s`, `2:05 min`: at most three digits."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    return f"{clock(seconds)} {'min' if seconds < 3600 else 'h'}"


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a bar chart of at most `width` characters, each the mean of its share, scaled to the range."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    buckets = min(width, len(finite))
    bounds = [len(finite) * bucket // buckets for bucket in range(buckets + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[0] * buckets
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)
