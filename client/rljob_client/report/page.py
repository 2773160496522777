"""The report of a run as one HTML file: it loads nothing, and no text of the run becomes markup or code."""

from __future__ import annotations

import base64
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from pydantic import ValidationError

from rljob_api.environment import is_secret_name
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_client.report.charts import Chart, learning_charts, peak_charts, seconds_chart
from rljob_client.report.run_files import RunContents
from rljob_client.report.samples_section import samples_section
from rljob_client.report.timeline_chart import Mark, timeline_chart
from rljob_client.run_directory.records import (
    ReadyRecord,
    RestoreRecord,
    evaluation_records,
    fault_records,
    plan_change_records,
)
from rljob_client.run_directory.reward_trend import reward_text
from rljob_client.run_directory.summary import Summary
from rljob_memory.fit import machine_text
from rljob_memory.plan_settings import texts_of
from rljob_memory.recovery import messages
from rljob_memory.sizes import human_bytes

Rows = Sequence[Sequence[object]]


def report_html(run: RunContents, now: datetime) -> str:
    """The page. `now`: the time that it names."""
    charts: list[Chart] = []

    def drawn(chart: Chart) -> str:
        charts.append(chart)
        wide = " wide" if chart.is_wide else ""
        return (
            f'<figure class="chart{wide}"><figcaption><b>{escape(chart.title)}</b> '
            f'<span>{escape(chart.note)}</span></figcaption><div class="drawing" id="chart-{len(charts) - 1}" '
            f'style="height:{chart.height}px"></div></figure>'
        )

    contents = {
        "Learning": "".join(map(drawn, learning_charts(run.steps, evaluation_records(run.records)))),
        "Samples": samples_section(run.samples),
        "Memory": "".join(map(drawn, _memory_charts(run))),
        "Time": drawn(seconds_chart(run.steps)) if run.steps else "",
        "Failures and remedies": _failures(run),
        "Plan against measured": _prediction(run.summary),
        "Configuration": _configuration(run),
        "Versions": _versions(run),
    }
    shown = {title: html for title, html in contents.items() if html}
    links = "".join(f'<a href="#{_anchor(title)}">{escape(title)}</a>' for title in shown)
    sections = "".join(f'<section id="{_anchor(t)}"><h2>{escape(t)}</h2>{html}</section>' for t, html in shown.items())
    figures = [{"data": chart.traces, "layout": chart.layout} for chart in charts]
    plotly = files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    script, style = (_resource(name) for name in ("report.js", "report.css"))
    written = f"Written by rljob-client {version('rljob-client')}, {now:%Y-%m-%d %H:%M} UTC."
    policy = f"default-src 'none'; script-src {_digest(plotly)} {_digest(script)}; style-src 'unsafe-inline'; " + (
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(run.summary.job)} – RLJob report</title><style>{style}</style></head>'
        f"<body><header>{_headline(run)}<nav>{links}</nav></header><main>{sections}</main><footer>{escape(written)}</footer>"
        f'<script type="application/json" id="figures">{_json(figures)}</script>'
        f"<script>{plotly}</script><script>{script}</script></body></html>\n"
    )


def _resource(name: str) -> str:
    return files("rljob_client.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    """The source expression that allows this inline script, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _json(value: object) -> str:
    """JSON in which no tag can begin or end."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def table(heads: Sequence[str], rows: Rows, *, numbers: Sequence[int] = ()) -> str:
    """An HTML table; empty without rows. `numbers`: columns that are aligned to the right."""
    if not rows:
        return ""
    aligned = [' class="number"' if index in numbers else "" for index in range(len(heads))]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for text, kind in zip(heads, aligned, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{escape(str(cell))}</td>' for cell, kind in zip(row, aligned, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# --- headline ---


def _headline(run: RunContents) -> str:
    summary = run.summary
    status, reason = (summary.status, summary.exit_reason) if run.is_ended else ("Not ended", _last_sign(run))
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><small>{escape(note)}</small></div>"
        for name, value, note in _facts(run)
    )
    kind = status.lower().replace(" ", "-")
    return (
        f'<h1>{escape(summary.job)} <span class="status {kind}">{status}</span></h1>'
        f'<p class="reason">{escape(reason)}</p><dl class="facts">{cards}</dl>'
    )


def _last_sign(run: RunContents) -> str:
    """The state of a run without a summary, as far as its files show it."""
    if not run.steps:
        return "No step is committed yet."
    last = run.steps[-1]
    return f"In progress, or killed: step {last.step} was committed at {_time(last.committed_at)}."


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _facts(run: RunContents) -> Iterator[tuple[str, str, str]]:
    """Name, value and remark of each fact."""
    summary = run.summary
    attempts = f"in {summary.attempts} attempts" if summary.attempts > 1 else ""
    yield "Steps", f"{summary.steps:,} of {summary.total_steps:,}", attempts
    if summary.last_reward is not None:
        first = "" if summary.first_reward is None else f"from {reward_text(summary.first_reward)}"
        window = f"mean of {summary.reward_window_steps} steps" if summary.reward_window_steps > 1 else "last step"
        stayed = "within the noise" if summary.reward_trend == "stayed" else ""
        yield "Reward now", reward_text(summary.last_reward), ", ".join(filter(None, (first, window, stayed)))
    evaluations = evaluation_records(run.records)
    if evaluations and (status := evaluations[-1].status) is not None:
        best = status.best
        note = f"{best.metric}, best {reward_text(best.score)} after step {best.step}"
        yield "Evaluation", reward_text(status.last.score), note
    if summary.step_seconds is not None:
        yield "Tokens per second", f"{summary.tokens_per_second:,.0f}", f"{summary.step_seconds.mean:.3g} s a step"
    hours = run.run_seconds / 3600
    if run.gpus:
        yield "GPU hours", f"{run.gpus * hours:,.2f}", f"{run.gpus} GPUs × {hours:,.2f} h"
    else:
        yield "Hours", f"{hours:,.2f}", "no GPUs are recorded"
    for role, peak in sorted(summary.peak_memory.items()):
        kind = "on a GPU" if peak.counts == "device" else "resident, one process"
        yield f"Peak memory, {role}", f"{peak.gib:,.2f} GiB", kind


# --- memory ---


def _memory_charts(run: RunContents) -> list[Chart]:
    timeline = run.timeline
    attempts = [attempt.started_at for attempt in run.attempts]
    charts = [] if timeline is None else [timeline_chart(timeline, timeline_marks(run), attempts)]
    return charts + (peak_charts(run.steps) if run.steps else [])


def timeline_marks(run: RunContents) -> list[Mark]:
    """The marks in the order of time."""
    changes = [record.change for record in plan_change_records(run.records)]
    marks = [
        Mark(change.time.timestamp(), f"{change.diagnosis.class_name}: {_remedy(change)}", not change.preventive)
        for change in changes
    ]
    for time, account in run.unanswered:
        marks.append(
            Mark(time.timestamp(), f"out of memory: {human_bytes(account.requested_bytes or 0)} requested", True)
        )
    return sorted(marks, key=lambda mark: mark.time)


# --- failures ---


def _failures(run: RunContents) -> str:
    rows: list[tuple[float, Sequence[object]]] = []
    for record in plan_change_records(run.records):
        change = record.change
        what = f"{messages.process_name(change.role, change.rank)}: " + (
            "projected to run out of memory" if change.preventive else "out of memory"
        )
        cause = f"{change.diagnosis.class_name} ({change.diagnosis.confidence:.0%}): {change.diagnosis.message}"
        place = _place(change.attempt, change.step, change.phase)
        rows.append((change.time.timestamp(), (place, what, cause, _remedy(change), _effect(change))))
    for time, account in run.unanswered:
        place = _place(None, account.step, account.phase)
        what = f"{account.role or 'a process'}: out of memory"
        rows.append((time.timestamp(), (place, what, account.text, "none", "")))
    parts = [
        table(
            ("time", "place", "failure", "cause", "change", "effect"),
            [(_time(at), *row) for at, row in sorted(rows, key=lambda each: each[0])],
        )
    ]
    faults = [
        (_place(fault.attempt, fault.step, fault.phase), fault.fault_class, fault.rank)
        for fault in fault_records(run.records)
    ]
    if faults:
        parts += ["<h3>Injected faults</h3>", table(("place", "fault", "rank"), faults)]
    if len(run.attempts) > 1 or (run.attempts and parts[0]):
        parts += ["<h3>Attempts</h3>", _attempts(run)]
    return "".join(parts) or "<p>None.</p>"


def _place(attempt: int | None, step: int | None, phase: str | None) -> str:
    parts = (attempt and f"attempt {attempt}", step and f"step {step}", phase or "start-up")
    return ", ".join(str(part) for part in parts if part)


def _remedy(change: PlanChange) -> str:
    return messages.setting_message(change.remedy)


def _effect(change: PlanChange) -> str:
    remedy, parts = change.remedy, []
    if remedy.expected_bytes:
        parts.append(f"expected {human_bytes(remedy.expected_bytes)}")
    if remedy.observed_bytes is not None:
        sign = "more in use " if remedy.observed_bytes < 0 else ""
        parts.append(f"observed {sign}{human_bytes(abs(remedy.observed_bytes))}")
    if change.seconds_to_recover is not None:
        parts.append(f"recovered in {change.seconds_to_recover:.1f} s")
    return ", ".join(parts) or ("" if change.preventive else "failed again, or not measured")


def _attempts(run: RunContents) -> str:
    restored = {record.attempt: record for record in run.records if isinstance(record, RestoreRecord)}
    ready = {record.attempt: record for record in reversed(run.records) if isinstance(record, ReadyRecord)}
    rows = []
    for attempt in run.attempts:
        number, own = attempt.attempt, [step.step for step in run.steps if step.attempt == attempt.attempt]
        restore, start = restored.get(number), ready.get(number)
        rows.append(
            (
                *(number, _time(attempt.started_at), f"{own[0]} to {own[-1]}" if own else "none"),
                f"step {restore.checkpoint_step}, {restore.replayed_steps} updates replayed" if restore else "",
                f"{sum(start.seconds.values()):.1f} s" if start else "",
            )
        )
    return table(("attempt", "started", "committed steps", "restored from", "start-up"), rows, numbers=(0, 4))


# --- prediction, configuration, versions ---


def _prediction(summary: Summary) -> str:
    rows: list[tuple[str, str, str, str]] = []
    for role, peak in sorted(summary.peak_memory.items()):
        if peak.predicted_gib is not None:
            rows.append(_compared(f"peak memory of a GPU, {role}", peak.predicted_gib, peak.gib, "GiB"))
    for phase, seconds in summary.predicted_seconds.items():
        if (measured := summary.seconds_by_phase.get(phase)) is not None and measured.mean:
            rows.append(_compared(f"seconds of a step, {phase}", seconds, measured.mean, "s"))
    if not rows:
        return "<p>The memory budget predicts memory and seconds on GPUs. This run has no prediction.</p>"
    note = "<p>Predicted seconds are for responses of the maximum length; measured ones are means over all steps.</p>"
    return table(("", "planned", "measured", "measured ÷ planned"), rows, numbers=(1, 2, 3)) + note


def _compared(name: str, planned: float, measured: float, unit: str) -> tuple[str, str, str, str]:
    ratio = f"{measured / planned:.2f}" if planned else ""
    return name, f"{planned:,.2f} {unit}", f"{measured:,.2f} {unit}", ratio


def _configuration(run: RunContents) -> str:
    parts = [f"<pre>{escape(_without_secrets(run))}</pre>" if run.manifest else "<p>There is no job.yaml.</p>"]
    plans = [record.plan for record in plan_change_records(run.records)]
    with suppress(ValidationError, IndexError):
        plans.append(MemoryPlan.model_validate(run.attempts[-1].plan))
    if plans:
        plan = max(plans, key=lambda plan: plan.generation)
        rows = list(texts_of(plan).items())
        parts += [f"<h3>Memory plan, generation {plan.generation}</h3>", table(("setting", "value"), rows)]
    return "".join(parts)


def _without_secrets(run: RunContents) -> str:
    """The manifest, without the values of variables that are probably secrets. A manifest that this version cannot read
    has its values of `value` removed."""
    if run.spec is None:
        lines = run.manifest.splitlines()
        return "\n".join("# not shown: it may hold a secret" if "value:" in line else line for line in lines)
    text = run.manifest
    for variable in run.spec.env or ():
        if variable.value and is_secret_name(variable.name):
            text = text.replace(variable.value, "(not shown)")
    return text


def _versions(run: RunContents) -> str:
    rows: Mapping[str, Any] = run.attempts[-1].versions if run.attempts else {}
    machine = f"<p>{escape(machine_text(run.setup))}</p>" if run.setup else ""
    reader = {"Python of this report": platform.python_version()}
    return machine + table(("package", "version"), [*rows.items(), *reader.items()])
