"""Marks on the memory timeline: failures, and changes of the memory plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from rljob_api.plan_change import PlanChange
from rljob_client.plot.timeline_plot import Mark
from rljob_memory.evidence.oom_snapshot import OomSnapshot
from rljob_memory.recovery import messages
from rljob_memory.sizes import human_bytes

_ANSWERED_WITHIN_SECONDS = 120.0
"""A plan change this soon after a failure is its recovery, and names its class."""


def timeline_marks(changes: Sequence[PlanChange], snapshots: Path) -> list[Mark]:
    """The marks in the order of time. `snapshots`: directory of `OomSnapshot`s; may be missing."""
    answers = [change.time.timestamp() for change in changes if not change.preventive]
    unanswered = [
        Mark(snapshot.time, f"out of memory: {human_bytes(snapshot.requested_bytes)} requested", failure=True)
        for snapshot in _read(snapshots)
        if not any(0 <= answer - snapshot.time <= _ANSWERED_WITHIN_SECONDS for answer in answers)
    ]
    return sorted([*unanswered, *map(_mark, changes)], key=lambda mark: mark.time)


def _mark(change: PlanChange) -> Mark:
    text = f"{change.diagnosis.class_name}: {messages.setting_message(change.remedy)}"
    return Mark(change.time.timestamp(), text, failure=not change.preventive)


def _read(directory: Path) -> Iterator[OomSnapshot]:
    for path in sorted(directory.glob("*.json")):
        with suppress(OSError, ValidationError):
            yield OomSnapshot.model_validate_json(path.read_bytes())
