"""The new status: drafted from the stored one, summarized, kept within bounds, and written when it is due."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.status import MAX_ATTEMPTS_KEPT, AttemptStatus, Condition, RemedyStatus, RLJobStatus, StatusDisplay
from rljob_operator.events import EventNote, EventReason
from rljob_operator.reconcile.view import condition_of, elapsed_seconds

_LONGEST_MESSAGE = 32_768

_INITIAL: dict[ConditionType, tuple[ConditionReason, str]] = {
    ConditionType.SUSPENDED: (ConditionReason.NOT_SUSPENDED, "spec.suspend is false"),
    ConditionType.SCHEDULED: (ConditionReason.WAITING_FOR_PODS, "the pods are being created"),
    ConditionType.RUNNING: (ConditionReason.STARTING, "the pods have not started"),
    ConditionType.MEMORY_PRESSURE: (ConditionReason.ENOUGH_MEMORY, "no out-of-memory failure is projected"),
    ConditionType.DEGRADED: (ConditionReason.NO_WARNING, "the last step has no warning"),
    ConditionType.RECOVERING: (ConditionReason.NO_FAILURE, "nothing has failed"),
    ConditionType.COMPLETE: (ConditionReason.STEPS_REMAIN, "not all steps are committed"),
    ConditionType.FAILED: (ConditionReason.NO_FAILURE, "nothing has failed"),
    ConditionType.READY: (ConditionReason.PENDING, "the pods are being created"),
    ConditionType.STALLED: (ConditionReason.NOT_STALLED, "no change by a person is needed"),
}


class StatusDraft:
    """The new status, and the Events that belong to it."""

    def __init__(self, stored: RLJobStatus, generation: int, now: datetime) -> None:
        self.status = stored
        self.events: list[EventNote] = []
        self.invalid_spec: str | None = None
        """Error in the present spec, which no attempt can use."""
        self._generation = generation
        self._now = now
        self._stored = {condition.type: condition for condition in stored.conditions}
        self._conditions = dict(self._stored)
        for type_ in ConditionType:
            if type_ not in self._conditions:
                self.reset(type_)
        self.set(observed_generation=generation)
        self._keep_conditions()

    def set(self, **fields: Any) -> None:
        self.status = self.status.model_copy(update=fields)

    # --- conditions ---

    def condition(self, type_: ConditionType, holds: bool, reason: str, message: str) -> None:
        """Set a condition. Its transition time changes only if its status differs from the stored one."""
        status: Literal["True", "False"] = "True" if holds else "False"
        stored = self._stored.get(type_)
        same_status = stored is not None and stored.status == status
        drafted = Condition(
            type=type_.value,
            status=status,
            reason=str(reason),
            message=clipped(message, _LONGEST_MESSAGE),
            last_transition_time=stored.last_transition_time if stored and same_status else self._now,
            observed_generation=self._generation,
        )
        self._conditions[type_] = drafted
        self._keep_conditions()

    def reset(self, type_: ConditionType) -> None:
        """Set the condition to its value before the start of a job."""
        self.condition(type_, False, *_INITIAL[type_])

    def holds(self, type_: ConditionType) -> bool:
        return self._conditions[type_].status == "True"

    def held(self, type_: ConditionType) -> bool:
        """The condition is true in the stored status."""
        stored = self._stored.get(type_)
        return stored is not None and stored.status == "True"

    def reason(self, type_: ConditionType) -> str:
        return self._conditions[type_].reason

    def message(self, type_: ConditionType) -> str:
        return self._conditions[type_].message

    def observe_generation(self) -> None:
        """Record that every condition takes the present spec into account, which `kubectl wait` checks."""
        for type_, condition in self._conditions.items():
            self._conditions[type_] = condition.model_copy(update={"observed_generation": self._generation})
        self._keep_conditions()

    def _keep_conditions(self) -> None:
        self.set(conditions=[self._conditions[type_] for type_ in ConditionType if type_ in self._conditions])

    # --- attempts ---

    @property
    def attempt(self) -> AttemptStatus | None:
        """The latest."""
        return self.status.attempts[-1] if self.status.attempts else None

    def begin_attempt(self, attempt: AttemptStatus) -> None:
        self.set(attempts=[*self.status.attempts, attempt][-MAX_ATTEMPTS_KEPT:])

    def change_attempt(self, **fields: Any) -> None:
        """Change the record of the latest attempt."""
        *earlier, latest = self.status.attempts
        self.set(attempts=[*earlier, latest.model_copy(update=fields)])

    # --- Events ---

    def event(self, type_: Literal["Normal", "Warning"], reason: EventReason, message: str) -> None:
        self.events.append(EventNote(type_, reason.value, message))


def clipped(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


# --- Summary ---


_LONGEST_SUMMARY = 512

_FINAL = {
    ConditionType.COMPLETE: ConditionReason.COMPLETE,
    ConditionType.FAILED: ConditionReason.FAILED,
}
_PASSING = {
    ConditionType.SUSPENDED: ConditionReason.SUSPENDED,
    ConditionType.RECOVERING: ConditionReason.RECOVERING,
    ConditionType.RUNNING: ConditionReason.RUNNING,
}
"""The phase is that of the first condition that holds."""

_NEEDS_A_PERSON = (
    ConditionReason.FOREIGN_OBJECT,
    ConditionReason.FOREIGN_POD,
    ConditionReason.POD_NOT_TERMINATING,
)
"""Reasons of Scheduled for which no pods are created until a person removes something."""


def summarize(draft: StatusDraft) -> None:
    """Set the conditions Ready and Stalled from the others, as in kstatus, which Flux and other tools read.

    The reason of Ready is the phase. https://github.com/kubernetes-sigs/cli-utils/blob/master/pkg/kstatus/README.md
    """
    if stalled := _why_stalled(draft):
        draft.condition(ConditionType.STALLED, True, stalled[0], clipped(stalled[1], _LONGEST_SUMMARY))
    else:
        draft.reset(ConditionType.STALLED)
    phase, message = _phase(draft)
    works = draft.holds(ConditionType.COMPLETE) or draft.holds(ConditionType.RUNNING)
    draft.condition(ConditionType.READY, works, phase, clipped(message, _LONGEST_SUMMARY))


def _why_stalled(draft: StatusDraft) -> tuple[str, str] | None:
    """Reason and message if nothing continues before a person acts."""
    if draft.holds(ConditionType.FAILED):
        return draft.reason(ConditionType.FAILED), draft.message(ConditionType.FAILED)
    if draft.invalid_spec is not None:
        return ConditionReason.INVALID_SPEC, draft.invalid_spec
    if draft.reason(ConditionType.SCHEDULED) in _NEEDS_A_PERSON:
        return draft.reason(ConditionType.SCHEDULED), draft.message(ConditionType.SCHEDULED)
    return None


def _phase(draft: StatusDraft) -> tuple[ConditionReason, str]:
    """The phase, and the message of the condition that it comes from."""
    invalid = draft.invalid_spec if not draft.holds(ConditionType.RUNNING) else None
    for type_, phase in (_FINAL if invalid else _FINAL | _PASSING).items():
        if draft.holds(type_):
            return phase, draft.message(type_)
    if invalid:
        return ConditionReason.INVALID, invalid
    waits = ConditionType.RUNNING if draft.holds(ConditionType.SCHEDULED) else ConditionType.SCHEDULED
    return ConditionReason.PENDING, draft.message(waits)


# --- Writes ---


@dataclass(frozen=True, slots=True)
class StatusWrite:
    """Time at which a drafted status is written."""

    wait_seconds: float | None
    """0: now. None: there is nothing to write."""
    is_delayed: bool = False
    """A change that is worth an immediate write waits, because the job has written too often."""


def due_write(
    stored: RLJobStatus, drafted: RLJobStatus, interval_seconds: float, budget_seconds: float, now: datetime
) -> StatusWrite:
    """Time at which `drafted` is written over `stored`.

    The basis of a decision is written at once. A change that a person waits for waits `budget_seconds`, which is 0
    unless the job has written too often. Progress and the wording of messages also wait until `interval_seconds` have
    passed since the last write.
    """
    changed = {name for name in RLJobStatus.model_fields if getattr(stored, name) != getattr(drafted, name)}
    changed.discard("update_time")
    if not changed:
        return StatusWrite(None)
    if stored.update_time is None or changed - _REPORTED - _PROGRESS - {"conditions", "attempts"}:
        return StatusWrite(0.0)
    if _basis(stored) != _basis(drafted):
        return StatusWrite(0.0)
    if changed & _REPORTED or "attempts" in changed or _transitions(stored) != _transitions(drafted):
        return StatusWrite(budget_seconds, is_delayed=budget_seconds > 0)
    return StatusWrite(max(budget_seconds, interval_seconds - elapsed_seconds(stored.update_time, now)))


_PROGRESS = {"step", "reward", "memory", "plan", "pods", "display"}
"""Fields that may wait."""
_REPORTED = {"observed_generation", "plan_changes", "adjustments", "last_out_of_memory"}
"""Fields that no decision rests on: the trainer alone reports them, and each reconcile merges them again."""
_REPORTING = (
    ConditionType.MEMORY_PRESSURE,
    ConditionType.DEGRADED,
    ConditionType.RECOVERING,
    ConditionType.READY,
    ConditionType.STALLED,
)
"""Conditions that no decision rests on."""


def _transitions(status: RLJobStatus) -> list[tuple[str, str, str, datetime]]:
    """The conditions without their messages."""
    return [(known.type, known.status, known.reason, known.last_transition_time) for known in status.conditions]


def _basis(status: RLJobStatus) -> tuple[list[tuple[str, str, str, datetime]], list[AttemptStatus]]:
    """The conditions and attempts, as far as decisions rest on them."""
    conditions = [
        (type_, holds, "" if type_ == ConditionType.RUNNING else reason, since)
        for type_, holds, reason, since in _transitions(status)
        if type_ not in _REPORTING
    ]
    attempts = [
        attempt.model_copy(update={"diagnosis": None, "remedy": attempt.remedy and _ANY_REMEDY})
        for attempt in status.attempts
    ]
    return conditions, attempts


_ANY_REMEDY = RemedyStatus(setting="", before="", after="")


def display(status: RLJobStatus) -> StatusDisplay:
    memory = status.memory
    ready = condition_of(status, ConditionType.READY)
    return StatusDisplay(
        phase=ready.reason if ready else "",
        step=_step(status.step or 0, status.steps),
        reward="" if status.reward is None else f"{status.reward:.4g}",
        peak=_gibibytes(memory.peak_reserved_bytes) if memory else "",
        headroom=_gibibytes(memory.headroom_bytes) if memory else "",
    )


def _step(step: int, steps: int | None) -> str:
    """`3/10`; only the committed steps if the spec now asks for fewer."""
    if not steps:
        return ""
    return f"{step}/{steps}" if step <= steps else str(step)


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f}Gi"


# --- Size ---


MAX_STATUS_BYTES = 512_000
_LONGEST_KEPT_MESSAGE = 4096
"""Length of the message of a condition. The API allows more."""


def bounded(status: RLJobStatus) -> RLJobStatus:
    """The status in at most MAX_STATUS_BYTES of JSON: the API server stores an object of at most 1.5 MiB, in which the
    spec and its own records count.

    Fields that only earlier attempts needed are left out; if it is still too large, the oldest records of attempts and
    plan changes too. The latest of each always stay.
    """
    if any(attempt.restarts_before for attempt in status.attempts[:-1]):
        *earlier, latest = status.attempts
        status = status.model_copy(update={"attempts": [*map(_without_restarts, earlier), latest]})
    if any(len(condition.message) > _LONGEST_KEPT_MESSAGE for condition in status.conditions):
        status = status.model_copy(update={"conditions": list(map(_with_short_message, status.conditions))})
    while _size_bytes(status) > MAX_STATUS_BYTES and (oldest := _oldest_record(status)):
        status = status.model_copy(update={oldest: getattr(status, oldest)[1:]})
    return status


def _with_short_message(condition: Condition) -> Condition:
    return condition.model_copy(update={"message": clipped(condition.message, _LONGEST_KEPT_MESSAGE)})


def _without_restarts(attempt: AttemptStatus) -> AttemptStatus:
    return attempt.model_copy(update={"restarts_before": {}})


def _oldest_record(status: RLJobStatus) -> str | None:
    """Name of the list that has the oldest record; None if only the latest records are left."""
    attempts, changes = status.attempts, status.plan_changes
    if len(changes) > 1 and (len(attempts) <= 1 or changes[0].attempt <= attempts[0].number):
        return "plan_changes"
    return "attempts" if len(attempts) > 1 else None


def _size_bytes(status: RLJobStatus) -> int:
    return len(status.model_dump_json(by_alias=True, exclude_none=True).encode())


# --- Rate of writes ---


BURST = 10.0
SECONDS_PER_WRITE = 2.0


@dataclass(frozen=True, slots=True)
class WriteBudget:
    """A token bucket of one job: BURST writes at once, then one in SECONDS_PER_WRITE. Times are seconds of any clock.

    The reports of pods cause writes, and the operator makes them: without a limit, one job could load the API server
    past the limits of its pods' account. Every write takes a token. A write that decisions rest on does not wait for
    one.
    """

    tokens: float = BURST
    counted_at: float = 0.0

    def seconds_left(self, now: float) -> float:
        """Seconds until a write that only reports may be made; 0: now."""
        return max(0.0, 1.0 - self._tokens(now)) * SECONDS_PER_WRITE

    def after_write(self, now: float) -> WriteBudget:
        return replace(self, tokens=max(0.0, self._tokens(now) - 1.0), counted_at=now)

    def _tokens(self, now: float) -> float:
        return min(BURST, self.tokens + max(0.0, now - self.counted_at) / SECONDS_PER_WRITE)
