"""`kubectl rljob status` and `top`: a job of the cluster as a tree, and the memory of its processes as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from rljob_api.conditions import ConditionType
from rljob_api.job import RLJobSpec, grown_spec
from rljob_api.metadata import INDEX_LABEL, ROLE_LABEL
from rljob_api.status import AttemptStatus, Condition, RLJobStatus
from rljob_api.step_report import RankMemory, StepReportStatus
from rljob_api.topology import pod_of_process
from rljob_memory.plan_settings import texts_of
from rljob_memory.recovery.messages import changed_message
from rljob_memory.sizes import human_bytes

_GOOD = {ConditionType.FITS, ConditionType.SCHEDULED, ConditionType.RUNNING, ConditionType.COMPLETE}
"""Conditions that are good news if they are true. Ready and Stalled repeat the others."""
_SHOWN_IF_FALSE = _GOOD - {ConditionType.COMPLETE}
_OFF = ("Disabled", "default", "none")
_ATTEMPTS_SHOWN, _CHANGES_SHOWN = 3, 5
_STYLES = {"Complete": "green", "Running": "green", "Recovering": "yellow", "Failed": "red", "Invalid": "red"}
_FULL = 0.9
"""Share of a limit from which memory is shown in yellow."""


def status_tree(
    name: str,
    spec: RLJobSpec,
    status: RLJobStatus,
    report: StepReportStatus | None,
    pods: Sequence[dict[str, Any]],
    now: datetime,
) -> Tree:
    """The job with its conditions, plan and latest failure, and its latest attempts with their pods and GPUs."""
    tree = Tree("  ".join(_headline(name, status, report)))
    if shown_conditions := [found for found in status.conditions if _is_shown(found)]:
        conditions = tree.add("conditions")
        for found in shown_conditions:
            conditions.add(_condition(found))
    if status.plan is not None:
        values = {name: text for name, text in texts_of(status.plan).items() if text not in _OFF}
        settings = ", ".join(name if text == "Enabled" else f"{name} {text}" for name, text in values.items())
        plan = tree.add(escape(f"memory plan, generation {status.plan.generation}: {settings}"))
        for change in status.plan_changes[-_CHANGES_SHOWN:]:
            plan.add(escape(f"step {change.step}: {change.diagnosis.class_name}: {changed_message(change)}"))
    if failure := status.last_out_of_memory:
        cause = f"{failure.diagnosis.class_name}: {failure.diagnosis.message}"
        tree.add(escape(f"last out-of-memory failure, step {failure.step}: {cause}"), style="yellow")
    for attempt in status.attempts[-_ATTEMPTS_SHOWN:]:
        branch = tree.add(escape(_attempt(attempt, now)))
    for pod in pods if status.attempts else ():
        labels, node = pod["metadata"]["labels"], pod["spec"].get("nodeName", "no node")
        shown = branch.add(escape("  ".join((pod["metadata"]["name"], _state(pod), node, *_gpus(pod)))))
        for rank in report.memory if report else ():
            role, index = pod_of_process(grown_spec(spec, status.plan), rank.role, rank.rank)
            if (role, str(index)) == (labels.get(ROLE_LABEL), labels.get(INDEX_LABEL)):
                shown.add(_rank(rank))
    return tree


def _headline(name: str, status: RLJobStatus, report: StepReportStatus | None) -> Iterator[str]:
    shown = status.display
    phase = shown.phase if shown else "Pending"
    yield f"[bold]{escape(name)}[/]"
    yield f"[{_STYLES.get(phase, 'dim')}]{phase}[/]"
    if shown and shown.step:
        yield f"step {shown.step}"
    if report and report.phase and phase == "Running":
        yield f"in {report.phase}"
    if shown and shown.reward:
        yield f"reward {shown.reward}"
    for what, count in (("adjustment", status.adjustments), ("restart", status.restarts)):
        if count:
            yield f"{count} {what}{'' if count == 1 else 's'}"


def _is_shown(found: Condition) -> bool:
    repeats = found.type in (ConditionType.READY, ConditionType.STALLED)
    return not repeats and (found.status != "False" or found.type in _SHOWN_IF_FALSE)


def _condition(found: Condition) -> str:
    is_good = (found.status == "True") == (found.type in _GOOD)
    style = "dim" if found.status == "Unknown" else "green" if is_good else "yellow"
    return f"[{style}]{found.type}={found.status}[/]  {found.reason}  {escape(found.message)}"


def _attempt(attempt: AttemptStatus, now: datetime) -> str:
    time = _duration(((attempt.end_time or now) - attempt.start_time).total_seconds())
    first, last = attempt.from_step, attempt.to_step or 0
    if attempt.end_time is None:
        return f"attempt {attempt.number}  from step {first}, for {time}"
    steps = f"steps {first} to {last}" if last >= first else "no step"
    code = "" if attempt.exit_code is None else f" (exit code {attempt.exit_code})"
    message = f": {attempt.message}" if attempt.message else ""
    return f"attempt {attempt.number}  {steps} in {time}, {attempt.reason}{code}{message}"


def _state(pod: dict[str, Any]) -> str:
    """`Running`, `Running, not ready`, `Terminating`, or the reason why it waits or has ended."""
    status = pod.get("status") or {}
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    for container in status.get("containerStatuses") or ():
        for state in ("waiting", "terminated"):
            if found := (container.get("state") or {}).get(state):
                code = f" (exit code {found['exitCode']})" if "exitCode" in found else ""
                return f"{found.get('reason') or state.capitalize()}{code}"
        if not container.get("ready"):
            return "Running, not ready"
    return str(status.get("phase") or "Pending")


def _gpus(pod: dict[str, Any]) -> Iterator[str]:
    """`2 × nvidia.com/gpu`, and other extended resources."""
    for container in pod["spec"]["containers"]:
        limits = (container.get("resources") or {}).get("limits") or {}
        yield from (f"{count} × {name}" for name, count in limits.items() if "/" in name)


def _rank(rank: RankMemory) -> str:
    if not rank.device_total_bytes:
        return f"{rank.role} {rank.rank}: host memory, peak {human_bytes(rank.peak_rss_bytes)}"
    peak, total = human_bytes(rank.peak_reserved_bytes), human_bytes(rank.device_total_bytes)
    return f"GPU of {rank.role} {rank.rank}: peak {peak} of {total}"


def _duration(seconds: float) -> str:
    """`42s`, `7m`, `3h12m`."""
    if seconds < 60:
        return f"{max(int(seconds), 0)}s"
    hours, minutes = divmod(int(seconds // 60), 60)
    return f"{hours}h{minutes}m" if hours else f"{minutes}m"


def memory_table(report: StepReportStatus | None) -> Group | str:
    """The memory of each process in the last committed step, against its limits."""
    if report is None or not report.memory:
        return "The job has not reported its memory yet: it does after the first committed step."
    table = Table("process", box=None, pad_edge=False, header_style="dim")
    for title in ("GPU reserved", "GPU peak", "GPU total", "host used", "host limit", "/dev/shm", "its size"):
        table.add_column(title, justify="right", no_wrap=True)
    for rank in sorted(report.memory, key=lambda rank: (rank.role, rank.rank)):
        gpu = (rank.reserved_bytes, rank.peak_reserved_bytes, rank.device_total_bytes)
        host = (rank.host_used_bytes, rank.host_limit_bytes)
        shared = (rank.shared_memory_used_bytes, rank.shared_memory_bytes)
        table.add_row(f"{rank.role} {rank.rank}", *_against(*gpu), *_against(*host), *_against(*shared))
    return Group(f"step {report.step}", table)


def _against(*sizes: int) -> Iterator[str]:
    """Sizes and, as the last one, their limit; those near it in yellow."""
    for size in sizes[:-1]:
        style = "yellow" if size >= _FULL * sizes[-1] else "default"
        yield f"[{style}]{human_bytes(size)}[/]" if sizes[-1] else "–"
    yield human_bytes(sizes[-1]) if sizes[-1] else "–"
