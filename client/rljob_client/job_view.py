"""`kubectl rljob status` and `top`: a job of the cluster as a tree, and the memory of its processes as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rljob_api.conditions import ConditionType
from rljob_api.job import RLJobSpec, grown_spec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.metadata import INDEX_LABEL, ROLE_LABEL
from rljob_api.status import AttemptStatus, Condition, RLJobStatus
from rljob_api.step_report import RankMemory, StepReportStatus
from rljob_api.topology import pod_of_process
from rljob_memory.plan_settings import texts_of
from rljob_memory.recovery.messages import changed_message
from rljob_memory.sizes import human_bytes

_NORMALLY_FALSE = frozenset(ConditionType) - {
    ConditionType.FITS,
    ConditionType.SCHEDULED,
    ConditionType.RUNNING,
    ConditionType.READY,
}
"""Conditions that are shown only if they are not False. Ready repeats the others."""
_ATTEMPTS_SHOWN = 3
_CHANGES_SHOWN = 5
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
    """The job, its conditions, plan and latest failure, and its latest attempts with their pods and GPUs."""
    tree = Tree(_headline(name, status, report))
    conditions = [found for found in status.conditions if _is_shown(found)]
    if conditions:
        branch = tree.add("conditions")
        for found in conditions:
            branch.add(_condition(found))
    if status.plan is not None:
        branch = tree.add(f"memory plan, generation {status.plan.generation}: {escape(_plan(status.plan))}")
        for change in status.plan_changes[-_CHANGES_SHOWN:]:
            branch.add(escape(f"step {change.step}: {change.diagnosis.class_name}: {changed_message(change)}"))
    if failure := status.last_out_of_memory:
        branch = tree.add(f"last out-of-memory failure: step {failure.step}, [yellow]{failure.diagnosis.class_name}[/]")
        branch.add(escape(failure.diagnosis.message))
    for attempt in status.attempts[-_ATTEMPTS_SHOWN:]:
        branch = tree.add(_attempt(attempt, now))
        if attempt is status.attempts[-1]:
            for pod in pods:
                _add_pod(branch, pod, spec, status, report)
    return tree


def _headline(name: str, status: RLJobStatus, report: StepReportStatus | None) -> str:
    shown = status.display
    phase = shown.phase if shown else "Pending"
    parts = [f"[bold]{escape(name)}[/]", f"[{_STYLES.get(phase, 'dim')}]{phase or 'Pending'}[/]"]
    if shown and shown.step:
        parts.append(f"step {shown.step}")
    if report and report.phase and phase in ("Running", "Recovering"):
        parts.append(f"in {report.phase}")
    if status.reward is not None:
        parts.append(f"reward {status.reward:.4g}")
    counts = {"adjustment": status.adjustments, "restart": status.restarts}
    parts += [f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts.items() if count]
    return "  ".join(parts)


def _is_shown(found: Condition) -> bool:
    return found.type != ConditionType.READY and not (found.type in _NORMALLY_FALSE and found.status == "False")


def _condition(found: Condition) -> str:
    is_good = (found.status == "True") != (found.type in _NORMALLY_FALSE - {ConditionType.COMPLETE})
    style = "dim" if found.status == "Unknown" else "green" if is_good else "yellow"
    return f"[{style}]{found.type}={found.status}[/]  {found.reason}  {escape(found.message)}"


def _plan(plan: MemoryPlan) -> str:
    """Settings of the plan that are on, or have a size."""
    return ", ".join(
        name if text == "Enabled" else f"{name} {text}"
        for name, text in texts_of(plan).items()
        if text not in ("Disabled", "default", "none")
    )


def _attempt(attempt: AttemptStatus, now: datetime) -> str:
    seconds = ((attempt.end_time or now) - attempt.start_time).total_seconds()
    head = f"attempt {attempt.number}  "
    if attempt.end_time is None:
        return f"{head}from step {attempt.from_step}, for {duration(seconds)}"
    first, last = attempt.from_step, attempt.to_step or 0
    steps = f"steps {first} to {last}" if last >= first else "no step"
    code = "" if attempt.exit_code is None else f" (exit code {attempt.exit_code})"
    message = f": {attempt.message}" if attempt.message else ""
    return escape(f"{head}{steps} in {duration(seconds)}, {attempt.reason}{code}{message}")


def _add_pod(
    branch: Tree, pod: dict[str, Any], spec: RLJobSpec, status: RLJobStatus, report: StepReportStatus | None
) -> None:
    labels, metadata = pod["metadata"]["labels"], pod["metadata"]
    node = pod["spec"].get("nodeName", "no node")
    pod_branch = branch.add(escape(f"{metadata['name']}  {pod_state(pod)}  {node}{_gpus(pod)}"))
    for rank in report.memory if report else ():
        role, index = pod_of_process(grown_spec(spec, status.plan), rank.role, rank.rank)
        if (role, str(index)) == (labels.get(ROLE_LABEL), labels.get(INDEX_LABEL)):
            pod_branch.add(_rank(rank))


def pod_state(pod: dict[str, Any]) -> str:
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


def _gpus(pod: dict[str, Any]) -> str:
    limits = [c.get("resources", {}).get("limits") or {} for c in pod["spec"]["containers"]]
    found = [f"{count} × {name}" for limit in limits for name, count in limit.items() if "/" in name]
    return f"  {', '.join(found)}" if found else ""


def _rank(rank: RankMemory) -> str:
    if not rank.device_total_bytes:
        return f"{rank.role} {rank.rank}: host memory, peak {human_bytes(rank.peak_rss_bytes)}"
    peak, total = rank.peak_reserved_bytes, rank.device_total_bytes
    return f"GPU of {rank.role} {rank.rank}: peak {human_bytes(peak)} of {human_bytes(total)}"


# --- top ---


def memory_table(report: StepReportStatus | None) -> Table | Group | Text:
    """The memory of each process in the last committed step, against its limits."""
    if report is None or not report.memory:
        return Text("The job has not reported its memory yet: it does after the first committed step.")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("process", "GPU reserved", "GPU peak", "GPU total", "host used", "host limit", "/dev/shm", "of"):
        table.add_column(title, justify="left" if title == "process" else "right", no_wrap=True)
    for rank in sorted(report.memory, key=lambda rank: (rank.role, rank.rank)):
        table.add_row(*_memory_row(rank))
    return Group(f"step {report.step}", table)


def _memory_row(rank: RankMemory) -> Iterator[str]:
    yield f"{rank.role} {rank.rank}"
    on_gpu = rank.device_total_bytes > 0
    yield human_bytes(rank.reserved_bytes) if on_gpu else "–"
    yield _against(rank.peak_reserved_bytes, rank.device_total_bytes) if on_gpu else "–"
    yield human_bytes(rank.device_total_bytes) if on_gpu else "–"
    yield _against(rank.host_used_bytes, rank.host_limit_bytes)
    yield human_bytes(rank.host_limit_bytes)
    yield _against(rank.shared_memory_used_bytes, rank.shared_memory_bytes)
    yield human_bytes(rank.shared_memory_bytes)


def _against(used: int, limit: int) -> str:
    """The size; in yellow if it is near its limit."""
    return f"[yellow]{human_bytes(used)}[/]" if limit and used >= _FULL * limit else human_bytes(used)


def duration(seconds: float) -> str:
    """`42s`, `7m`, `3h12m`, `2d4h`."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60}m"
    return f"{minutes}m" if minutes else f"{max(int(seconds), 0)}s"
