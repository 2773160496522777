"""Keeps the StepReport up to date in a thread. The loop never waits for it and never fails because of it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from rljob_api.memory_facts import MemoryFacts
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import MAX_PLAN_CHANGES_KEPT, Phase, PlanChange, Role
from rljob_api.step_report import (
    MAX_RANKS_REPORTED,
    Evidence,
    MemoryPressure,
    PendingExit,
    PhaseSeconds,
    RankMemory,
    StepReportStatus,
    TrainingWarning,
)
from rljob_client.run_directory.records import EvaluationRecord, StepRecord
from rljob_memory.sample import MemorySample
from rljob_trainer.run_listener import RunListener
from rljob_trainer.step_report.api_server import NoAnswer

_WARN_EVERY_SECONDS = 60.0
_LONGEST_BACKOFF_OF_CLOSE_SECONDS = 1.0


class ReportStore(Protocol):
    """The place of the report. Both methods raise `NoAnswer`."""

    def read(self) -> StepReportStatus | None: ...
    def apply(self, report: StepReportStatus) -> None: ...


class StepReporter(RunListener):
    """Sends the latest state. Changes that arrive before the next report is due are sent together.

    Call `close` to send the last state.
    """

    def __init__(self, store: ReportStore | None, attempt: int) -> None:
        """`store`: None outside a cluster, where nothing reads the report."""
        self._report = StepReportStatus(attempt=attempt)
        self._changes: dict[int, PlanChange] = {}
        self._forecast: MemoryPressure | None = None
        self._shortage: MemoryPressure | None = None
        self._changed = threading.Condition()
        self._to_send = self._urgent = False
        self._close_by: float | None = None
        self._schedule = SendSchedule()
        self._carried_over = False
        self._warn: Callable[[str], None] = lambda _text: None
        self._next_warning = 0.0
        self._thread = threading.Thread(target=self._send_changes, args=(store,), name="step-report", daemon=True)
        if store is not None:
            self._thread.start()

    # --- calls of the loop ---

    def attempt_began(self, plan: MemoryPlan, committed: Sequence[StepRecord], warn: Callable[[str], None]) -> None:
        self._warn = warn
        last = _step_fields(committed[-1]) if committed else {}
        self._set(urgent=True, plan=plan, plan_generation=plan.generation, step=len(committed), **last)

    def memory_facts_found(self, facts: MemoryFacts, changes: Sequence[PlanChange]) -> None:
        self._changes = {change.generation: change for change in changes}
        self._set(memory_facts=facts, plan_changes=self._latest_changes())

    def phase_began(self, step: int, phase: Phase) -> None:
        self._set(phase=phase)

    def step_committed(self, record: StepRecord, memory: Mapping[str, Mapping[Phase, MemorySample]]) -> None:
        self._set(step=record.step, memory=memory_of_ranks(memory), **_step_fields(record))

    def evaluated(self, record: EvaluationRecord) -> None:
        self._set(evaluation=record.status)

    def failed(self, evidence: Evidence) -> None:
        self._set(urgent=True, last_evidence=evidence)

    def exit_pending(self, pending: PendingExit) -> None:
        """The attempt waits for its restart in place, and exits with `pending` if none comes."""
        self._set(urgent=True, pending_exit=pending)

    def plan_changed(self, change: PlanChange, plan: MemoryPlan) -> None:
        self._changes[change.generation] = change
        self._set(urgent=True, plan=plan, plan_generation=plan.generation, plan_changes=self._latest_changes())

    def recovered(self, change: PlanChange) -> None:
        self._changes[change.generation] = change
        self._set(urgent=True, plan_changes=self._latest_changes())

    def pressure(self, pressure: MemoryPressure | None) -> None:
        is_new, self._forecast = pressure is not None and self._forecast is None, pressure
        self._set(urgent=is_new, memory_pressure=self._shortage or pressure)

    def shortage(self, pressure: MemoryPressure | None) -> None:
        """A container is about to reach its limit within the step; None: no longer. Called from any thread."""
        if _limit_at_risk(pressure) != _limit_at_risk(self._shortage):
            self._shortage = pressure
            self._set(urgent=pressure is not None, memory_pressure=pressure or self._forecast)

    def training_warning(self, warning: TrainingWarning | None) -> None:
        self._set(training_warning=warning)

    def close(self, timeout_seconds: float) -> None:
        """Try to send the last state, for at most `timeout_seconds`."""
        with self._changed:
            self._close_by = time.monotonic() + timeout_seconds
            self._schedule = SendSchedule(_LONGEST_BACKOFF_OF_CLOSE_SECONDS)  # without the current backoff
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def _latest_changes(self) -> list[PlanChange]:
        return [self._changes[generation] for generation in sorted(self._changes)][-MAX_PLAN_CHANGES_KEPT:]

    def _set(self, *, urgent: bool = False, **fields: Any) -> None:
        with self._changed:
            self._report = self._report.model_copy(update=fields)
            self._to_send = True
            self._urgent = self._urgent or urgent
            self._changed.notify()

    # --- the thread ---

    def _send_changes(self, store: ReportStore) -> None:
        while self._wait_until_due():
            try:
                if not self._carried_over:
                    self._carry_over(store.read())
                store.apply(self._take())
            except NoAnswer as failure:
                self._not_sent(str(failure), failure.retry_after_seconds)
            except Exception as error:
                self._not_sent(f"{type(error).__name__}: {error}", 0.0)
            else:
                self._schedule.succeeded(time.monotonic())

    def _wait_until_due(self) -> bool:
        """Returns False after `close`, once everything is sent or the time is over."""
        with self._changed:
            while True:
                now = time.monotonic()
                closing = self._close_by is not None
                if self._close_by is not None and (not self._to_send or now >= self._close_by):
                    return False
                wait = self._schedule.wait_seconds(now, urgent=self._urgent or closing) if self._to_send else None
                if wait == 0:
                    return True
                self._changed.wait(wait)

    def _carry_over(self, stored: StepReportStatus | None) -> None:
        """An apply removes the fields that it leaves out, so those of an earlier attempt have to be sent again."""
        with self._changed:
            for name in ("last_evidence", "evaluation") if stored is not None else ():
                if getattr(self._report, name) is None:
                    self._report = self._report.model_copy(update={name: getattr(stored, name)})
        self._carried_over = True

    def _take(self) -> StepReportStatus:
        with self._changed:
            self._to_send = self._urgent = False
            return self._report.model_copy(update={"update_time": datetime.now(UTC)})

    def _not_sent(self, why: str, retry_after_seconds: float) -> None:
        now = time.monotonic()
        with self._changed:
            self._to_send = True
            self._schedule.failed(now, retry_after_seconds)
        if now >= self._next_warning:
            self._next_warning = now + _WARN_EVERY_SECONDS
            self._warn(f"the StepReport could not be written, training continues: {why}")


def _limit_at_risk(pressure: MemoryPressure | None) -> tuple[Role, int, int] | None:
    """Process and limit: the bytes in use change with every look."""
    return None if pressure is None else (pressure.role, pressure.rank, pressure.diagnosis.numbers["limit_bytes"])


def _step_fields(record: StepRecord) -> dict[str, Any]:
    """Fields of the report about the last step. A reward that is not finite is left out: JSON cannot express it."""
    return {
        "reward": record.reward.mean if math.isfinite(record.reward.mean) else None,
        "tokens_per_second": record.tokens_per_second,
        "seconds": PhaseSeconds.model_validate(record.seconds),
    }


INTERVAL_SECONDS = 5.0
_LONGEST_BACKOFF_SECONDS = 60.0


class SendSchedule:
    """At most one report per interval, urgent ones at once, and fewer after failures. Times are in seconds."""

    def __init__(self, longest_backoff_seconds: float = _LONGEST_BACKOFF_SECONDS) -> None:
        self._longest_backoff_seconds = longest_backoff_seconds
        self._next_regular = 0.0
        self._next_allowed = 0.0
        self._failures = 0

    def wait_seconds(self, now: float, *, urgent: bool) -> float:
        """Seconds until a report may be sent; 0: send it now."""
        due = self._next_allowed if urgent else max(self._next_regular, self._next_allowed)
        return max(0.0, due - now)

    def succeeded(self, now: float) -> None:
        self._failures = 0
        self._next_regular = now + INTERVAL_SECONDS
        self._next_allowed = now

    def failed(self, now: float, retry_after_seconds: float = 0.0) -> None:
        """`retry_after_seconds`: as requested by the API server."""
        self._failures += 1
        backoff = min(INTERVAL_SECONDS * 2 ** (self._failures - 1), self._longest_backoff_seconds)
        self._next_allowed = now + max(backoff, retry_after_seconds)


_REPORTED_NUMBERS = tuple(RankMemory.model_fields.keys() - {"role", "rank", "phase"})


def rank_memory(role: Role, rank: int, phase: Phase, sample: MemorySample) -> RankMemory:
    """A sample in the form of the API."""
    return RankMemory(role=role, rank=rank, phase=phase, **{name: getattr(sample, name) for name in _REPORTED_NUMBERS})


def memory_of_ranks(memory: Mapping[str, Mapping[Phase, MemorySample]]) -> list[RankMemory]:
    """One entry per process and phase: at most 256, those with the least free memory."""
    entries = [
        rank_memory(*role_and_rank(actor), phase, sample)
        for actor, phases in memory.items()
        for phase, sample in phases.items()
    ]
    if len(entries) <= MAX_RANKS_REPORTED:
        return entries
    return sorted(entries, key=lambda entry: (entry.device_free_bytes, -entry.peak_rss_bytes))[:MAX_RANKS_REPORTED]


def role_and_rank(actor: str | None) -> tuple[Role, int]:
    """("policy", 1) for "policy-1"; ("controller", 0) for None, since the controller is not an actor."""
    if actor is None:
        return "controller", 0
    name, _, rank = actor.rpartition("-")
    return "policy" if name == "policy" else "rollout", int(rank)
