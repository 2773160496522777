"""The summary that is printed at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rljob_api.bounds import storable
from rljob_api.plan_change import PlanChange
from rljob_client.run_directory.reward_trend import reward_text
from rljob_client.run_directory.summary import Summary
from rljob_memory.recovery import messages
from rljob_memory.sizes import human_bytes
from rljob_trainer.display.run_display import short_seconds

_STATUS_STYLE = {"Complete": "bold green", "Stopped": "bold yellow", "Failed": "bold red"}
_MEMORY_COUNTED = {"device": "reserved by torch on its GPU", "host": "resident host memory"}
_BAR_WIDTH = 24
_MOST_PLAN_CHANGES = 5


def print_summary(summary: Summary, console: Console, output: Path) -> None:
    """Print the summary as a table. `output`: the run's directory."""
    style = _STATUS_STYLE[summary.status]
    console.print(
        f"\n[bold]{escape(summary.job)}[/]  [{style}]{summary.status}[/]  {escape(summary.exit_reason)}",
        # Without a terminal, a message stays on one line, whatever its length.
        soft_wrap=not console.is_terminal,
    )
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in _rows(summary):
        table.add_row(name, value)
    table.add_row("files", escape(storable(str(output))))
    console.print(table)


def _rows(summary: Summary) -> Iterator[tuple[str, str]]:
    total, lowered = f"of {summary.total_steps}", ""
    if summary.steps > summary.total_steps:
        total, lowered = "committed", f"; algorithm.steps is {summary.total_steps}"
    yield "steps", f"[bold]{summary.steps}[/] {total}{_history(summary)}{lowered}"
    if summary.last_reward is not None:
        yield "reward", _reward(summary, summary.last_reward)
    if (evaluation := summary.evaluation) is not None:
        last, best = evaluation.last, evaluation.best
        yield (
            "evaluation",
            f"[bold]{reward_text(last.score)}[/], best {reward_text(best.score)} (step {best.step})  "
            f"[dim]{last.metric}, {summary.evaluations} in {short_seconds(summary.evaluation_seconds)}[/]",
        )
    for name, count, note in (
        ("skipped prompts", summary.skipped_prompts, "longer than algorithm.maxPromptTokens"),
        ("failed rewards", summary.reward_errors, "counted as 0 (task.onRewardError)"),
        ("skipped updates", summary.skipped_updates, "their gradient was not finite"),
        ("dropped tokens", summary.dropped_tokens, "without a finite log-probability from the engine"),
        ("without gradient", summary.steps_without_gradient, "steps, with equal rewards in each group"),
        ("skipped tokens", summary.skipped_tokens, "their advantage is 0"),
        ("empty responses", summary.empty_responses, ""),
    ):
        if count:
            yield name, f"{count:,}  [dim]{note}[/]"
    if summary.truncated_ratio:
        yield "truncated", f"{summary.truncated_ratio:.0%} of the responses  [dim]at algorithm.maxResponseTokens[/]"
    if summary.step_seconds:
        yield "speed", f"{summary.tokens_per_second:,.0f} tokens/s, {short_seconds(summary.step_seconds.mean)} a step"
        yield from _phase_rows(summary, summary.step_seconds.sum)
    if summary.startup_seconds is not None:
        yield "start-up", short_seconds(summary.startup_seconds)
    yield from _plan_change_rows(summary)
    for role, peak in sorted(summary.peak_memory.items()):
        predicted = "" if peak.predicted_gib is None else f"; {peak.predicted_gib:.2f} predicted"
        yield f"peak memory, {role}", f"{peak.gib:.2f} GiB  [dim]{_MEMORY_COUNTED[peak.counts]}{predicted}[/]"


def _reward(summary: Summary, last: float) -> str:
    """`0.060 → 0.996  means of 5 steps`, or the reward of the only step."""
    window = summary.reward_window_steps
    means = f"means of {window} steps" if window > 1 else "one step" if summary.first_reward is None else "single steps"
    noise = ", within the noise" if summary.reward_trend == "stayed" else ""
    first = "" if summary.first_reward is None else f"{reward_text(summary.first_reward)} → "
    return f"{first}[bold]{reward_text(last)}[/]  [dim]{means}{noise}[/]"


def _phase_rows(summary: Summary, whole_seconds: float) -> Iterator[tuple[str, str]]:
    for name, seconds in summary.seconds_by_phase.items():
        if not seconds.sum:
            continue
        share = seconds.sum / whole_seconds
        bar = "━" * max(1, round(share * _BAR_WIDTH))
        predicted = summary.predicted_seconds.get(name)
        compared = "" if predicted is None else f"  [dim]{short_seconds(predicted)} predicted[/]"
        yield f"  {name}", f"[cyan]{bar:<{_BAR_WIDTH}}[/] {share:>4.0%}  {short_seconds(seconds.mean)}{compared}"


def _plan_change_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """The latest changes of the memory plan, each with its cause and its effect."""
    hidden = len(summary.plan_changes) - _MOST_PLAN_CHANGES
    if hidden > 0:
        yield "plan changes", f"[dim]{hidden} earlier ones not shown[/]"
    for number, change in enumerate(summary.plan_changes[-_MOST_PLAN_CHANGES:]):
        yield "plan changes" if number == 0 and hidden <= 0 else "", escape(_plan_change(change))


def _plan_change(change: PlanChange) -> str:
    """`microBatchTokens 192 → 96, ActivationSpike at step 2, freed 5.7 GiB, recovered in 6.0 s`."""
    when = "before" if change.preventive else "after"
    parts = [
        messages.setting_message(change.remedy),
        f"{when} {change.diagnosis.class_name} at step {change.step}",
    ]
    if (freed := change.remedy.observed_bytes) is not None:
        parts.append(f"freed {human_bytes(freed)}")
    if change.seconds_to_recover is not None:
        parts.append(f"recovered in {short_seconds(change.seconds_to_recover)}")
    return ", ".join(parts)


def _history(summary: Summary) -> str:
    if summary.attempts < 2:
        return ""
    replayed = f", {summary.replayed_steps} replayed" if summary.replayed_steps else ""
    return f" in {summary.attempts} attempts{replayed}"
