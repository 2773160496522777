"""The new status: drafted from the stored one, summarized, kept within bounds, and written when it is due."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.evaluation import EvaluationStatus
from rljob_api.memory_plan import MemoryPlan
from rljob_api.status import MAX_ATTEMPTS_KEPT, AttemptStatus, Condition, RemedyStatus, RLJobStatus, StatusDisplay
from rljob_operator.events import EventNote, EventReason
from rljob_operator.reconcile.view import condition_of, elapsed_seconds
from rljob_operator.token_bucket import TokenBucket

_MAX_MESSAGE_CHARACTERS = 4096
"""Maximum length of a condition's message. The API allows more, but an object must not be too large for the API
server."""

_INITIAL: dict[ConditionType, tuple[ConditionReason, str]] = {
    ConditionType.SUSPENDED: (ConditionReason.NOT_SUSPENDED, "spec.suspend is false"),
    ConditionType.FITS: (ConditionReason.NOT_PREDICTED, "the memory of the job is not predicted yet"),
    ConditionType.SCHEDULED: (ConditionReason.WAITING_FOR_PODS, "the pods are being created"),
    ConditionType.RUNNING: (ConditionReason.STARTING, "the pods have not started"),
    ConditionType.MEMORY_PRESSURE: (ConditionReason.ENOUGH_MEMORY, "no out-of-memory failure is projected"),
    ConditionType.DEGRADED: (ConditionReason.NO_WARNING, "the last step has no warning"),
    ConditionType.RECOVERING: (ConditionReason.NO_FAILURE, "nothing has failed"),
    ConditionType.COMPLETE: (ConditionReason.STEPS_REMAIN, "not all steps are committed"),
    ConditionType.FAILED: (ConditionReason.NO_FAILURE, "nothing has failed"),
    ConditionType.READY: (ConditionReason.PENDING, "the pods are being created"),
    ConditionType.STALLED: (ConditionReason.NOT_STALLED, "no action is needed"),
}


_WARNINGS = {
    ConditionReason.CONTROLLER_ON_GPU_NODE: EventReason.CONTROLLER_ON_GPU_NODE,
    ConditionReason.DOES_NOT_FIT: EventReason.DOES_NOT_FIT,
    ConditionReason.FOREIGN_OBJECT: EventReason.FOREIGN_OBJECT,
    ConditionReason.MEMORY_RUNNING_OUT: EventReason.MEMORY_PRESSURE,
    ConditionReason.NODE_LOST: EventReason.NODE_LOST,
    ConditionReason.OBJECT_LEFT_BEHIND: EventReason.OBJECT_LEFT_BEHIND,
    ConditionReason.POD_NOT_TERMINATING: EventReason.POD_NOT_TERMINATING,
    ConditionReason.STEP_OVERDUE: EventReason.STEP_OVERDUE,
    ConditionReason.STEP_REPORT_IGNORED: EventReason.STEP_REPORT_IGNORED,
}
"""Reasons with a warning Event of the same message, when a condition gets them."""


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

    def condition(self, type_: ConditionType, holds: bool | None, reason: str, message: str) -> None:
        """Set a condition. Its transition time changes only if its status differs from the stored one.

        `holds`: None is the status Unknown.
        """
        status: Literal["True", "False", "Unknown"] = "Unknown" if holds is None else "True" if holds else "False"
        stored = self._stored.get(type_)
        same_status = stored is not None and stored.status == status
        self._conditions[type_] = Condition(
            type=type_.value,
            status=status,
            reason=str(reason),
            message=clipped(message, _MAX_MESSAGE_CHARACTERS),
            last_transition_time=stored.last_transition_time if stored and same_status else self._now,
            observed_generation=self._generation,
        )
        self._keep_conditions()
        is_new = stored is None or stored.reason != reason
        if is_new and reason in _WARNINGS and type_ is not ConditionType.STALLED:  # which repeats reasons of others
            self.event("Warning", _WARNINGS[ConditionReason(reason)], message)

    def reset(self, *types: ConditionType) -> None:
        """Set conditions to their values before the start of a job."""
        for type_ in types:
            self.condition(type_, None if type_ is ConditionType.FITS else False, *_INITIAL[type_])

    def no_pods_run(self, reason: ConditionReason, message: str) -> None:
        for type_ in (ConditionType.SCHEDULED, ConditionType.RUNNING):
            self.condition(type_, False, reason, message)

    def holds(self, type_: ConditionType) -> bool:
        return self._conditions[type_].status == "True"

    def reason(self, type_: ConditionType) -> str:
        return self._conditions[type_].reason

    def reason_and_message(self, type_: ConditionType) -> tuple[str, str]:
        return self._conditions[type_].reason, self._conditions[type_].message

    def observe_generation(self) -> None:
        """Record that every condition takes the present spec into account, which `kubectl wait` checks."""
        for type_, condition in self._conditions.items():
            self._conditions[type_] = condition.model_copy(update={"observed_generation": self._generation})
        self._keep_conditions()

    def _keep_conditions(self) -> None:
        self.set(conditions=[self._conditions[type_] for type_ in ConditionType if type_ in self._conditions])

    @property
    def attempt(self) -> AttemptStatus | None:
        """The latest."""
        return self.status.attempts[-1] if self.status.attempts else None

    def begin_attempt(self, number: int, plan: MemoryPlan | None, **fields: Any) -> None:
        """Record an attempt under `plan`, from the first step that is not committed."""
        attempt = AttemptStatus(
            number=number,
            plan_generation=plan.generation if plan else 1,
            start_time=self._now,
            from_step=(self.status.step or 0) + 1,
            **fields,
        )
        self.set(attempts=[*self.status.attempts, attempt][-MAX_ATTEMPTS_KEPT:])

    def change_attempt(self, **fields: Any) -> None:
        """Change the record of the latest attempt."""
        *earlier, latest = self.status.attempts
        self.set(attempts=[*earlier, latest.model_copy(update=fields)])

    def end_attempt(self) -> None:
        """Record that the pods of the latest attempt are gone, unless there is none or that is known."""
        if self.attempt is not None and self.attempt.end_time is None:
            self.change_attempt(end_time=self._now)

    def event(self, type_: Literal["Normal", "Warning"], reason: EventReason, message: str) -> None:
        self.events.append(EventNote(type_, reason.value, message))


def clipped(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


# --- Summary ---


_MAX_SUMMARY_CHARACTERS = 512
_FINAL = {ConditionType.COMPLETE: ConditionReason.COMPLETE, ConditionType.FAILED: ConditionReason.FAILED}
_PASSING = {
    ConditionType.SUSPENDED: ConditionReason.SUSPENDED,
    ConditionType.RECOVERING: ConditionReason.RECOVERING,
    ConditionType.RUNNING: ConditionReason.RUNNING,
}
"""The phase is that of the first condition that holds."""
_NEEDS_A_PERSON = (
    ConditionReason.FOREIGN_OBJECT,
    ConditionReason.FOREIGN_POD,
    ConditionReason.NOT_ADMITTED,
    ConditionReason.POD_NOT_TERMINATING,
)
"""Reasons of Scheduled for which no pods are created until a person acts."""


def summarize(draft: StatusDraft) -> None:
    """Set the conditions Ready and Stalled from the others, as in kstatus, which Flux and other tools read.

    The reason of Ready is the phase. https://github.com/kubernetes-sigs/cli-utils/blob/master/pkg/kstatus/README.md
    """
    if stalled := _why_stalled(draft):
        draft.condition(ConditionType.STALLED, True, stalled[0], clipped(stalled[1], _MAX_SUMMARY_CHARACTERS))
    else:
        draft.reset(ConditionType.STALLED)
    phase, message = _phase(draft)
    works = draft.holds(ConditionType.COMPLETE) or draft.holds(ConditionType.RUNNING)
    draft.condition(ConditionType.READY, works, phase, clipped(message, _MAX_SUMMARY_CHARACTERS))


def _why_stalled(draft: StatusDraft) -> tuple[str, str] | None:
    """Return reason and message if nothing continues before a person acts."""
    if draft.invalid_spec is not None:
        return ConditionReason.INVALID_SPEC, draft.invalid_spec
    if draft.holds(ConditionType.FAILED):
        return draft.reason_and_message(ConditionType.FAILED)
    if draft.reason(ConditionType.SCHEDULED) in _NEEDS_A_PERSON:
        return draft.reason_and_message(ConditionType.SCHEDULED)
    return None


def _phase(draft: StatusDraft) -> tuple[ConditionReason, str]:
    """Return the phase, and the message of the condition that it comes from."""
    invalid = draft.invalid_spec if not draft.holds(ConditionType.RUNNING) else None
    for type_, phase in (_FINAL if invalid else _FINAL | _PASSING).items():
        if draft.holds(type_):
            return phase, draft.reason_and_message(type_)[1]
    if invalid:
        return ConditionReason.INVALID, invalid
    waits = ConditionType.RUNNING if draft.holds(ConditionType.SCHEDULED) else ConditionType.SCHEDULED
    return ConditionReason.PENDING, draft.reason_and_message(waits)[1]


def display(status: RLJobStatus) -> StatusDisplay:
    """Return the columns of `kubectl get rljobs`."""
    memory, ready = status.memory, condition_of(status, ConditionType.READY)
    step, steps = status.step or 0, status.steps
    # `3/10`; only the committed steps if the spec now asks for fewer
    progress = f"{step}/{steps}" if steps and step <= steps else str(step) if steps else ""
    return StatusDisplay(
        phase=ready.reason if ready else "",
        step=progress,
        reward="" if status.reward is None else f"{status.reward:.4g}",
        evaluation=_evaluation(status.evaluation),
        peak=f"{memory.peak_reserved_bytes / 2**30:.1f}Gi" if memory else "",
        headroom=f"{memory.headroom_bytes / 2**30:.1f}Gi" if memory else "",
    )


def _evaluation(evaluation: EvaluationStatus | None) -> str:
    """`0.93 (40)`, or `0.91 (60), best 0.93 (40)`: scores, each with its step."""
    if evaluation is None:
        return ""
    last, best = (f"{each.score:.4g} ({each.step})" for each in (evaluation.last, evaluation.best))
    return last if evaluation.last.step == evaluation.best.step else f"{last}, best {best}"


# --- Writes ---


def due_write(
    stored: RLJobStatus, drafted: RLJobStatus, interval_seconds: float, budget_seconds: float, now: datetime
) -> tuple[float | None, bool]:
    """Return the seconds until `drafted` is written over `stored` (0: now; None: there is nothing to write), and True
    if a change that is worth an immediate write waits, because the job has written too often.

    A change that decisions rest on is written at once. A change that a person waits for waits `budget_seconds`, which
    is 0 unless the job has written too often. Progress and the wording of messages also wait until `interval_seconds`
    have passed since the last write.
    """
    if _without(stored, {"update_time"}) == _without(drafted, {"update_time"}):
        return None, False
    if stored.update_time is None or _decisive(stored) != _decisive(drafted):
        return 0.0, False
    if _noteworthy(stored) != _noteworthy(drafted):
        return budget_seconds, budget_seconds > 0
    return max(budget_seconds, interval_seconds - elapsed_seconds(stored.update_time, now)), False


_PROGRESS = {"step", "reward", "evaluation", "memory", "plan", "pods", "display", "update_time"}
"""Fields that may wait."""
_REPORTED = {"observed_generation", "plan_changes", "adjustments", "last_out_of_memory"}
"""Fields that no decision rests on: the trainer alone reports them, and each reconcile merges them again."""
_REPORTING_CONDITIONS = (
    ConditionType.FITS,
    ConditionType.MEMORY_PRESSURE,
    ConditionType.DEGRADED,
    ConditionType.RECOVERING,
    ConditionType.READY,
    ConditionType.STALLED,
)
"""Conditions that no decision rests on."""
_ANY_REMEDY = RemedyStatus(setting="", before="", after="")


def _without(status: RLJobStatus, fields: set[str]) -> dict[str, Any]:
    return {name: value for name, value in status if name not in fields}


def _noteworthy(status: RLJobStatus) -> dict[str, Any]:
    """Return the fields that a person waits for: all but progress, the messages of conditions, and that the job
    fits."""
    conditions = [
        (one.type, one.status, one.reason, one.last_transition_time)
        for one in status.conditions
        if one.type != ConditionType.FITS or one.status == "False"
    ]
    return _without(status, _PROGRESS) | {"conditions": conditions}


def _decisive(status: RLJobStatus) -> dict[str, Any]:
    """Return the fields that decisions rest on."""
    conditions = [
        (one.type, one.status, one.reason if one.type != ConditionType.RUNNING else "", one.last_transition_time)
        for one in status.conditions
        if one.type not in _REPORTING_CONDITIONS
    ]
    attempts = [
        attempt.model_copy(update={"diagnosis": None, "remedy": attempt.remedy and _ANY_REMEDY})
        for attempt in status.attempts
    ]
    limits = [getattr(status.plan, name, None) for name in ("host_memory_bytes", "controller_host_memory_bytes")]
    decided = {"conditions": conditions, "attempts": attempts, "limits": limits}
    return _without(status, _PROGRESS | _REPORTED) | decided


# --- Size ---


MAX_STATUS_BYTES = 512_000


def bounded(status: RLJobStatus) -> RLJobStatus:
    """Return the status in at most MAX_STATUS_BYTES of JSON: the API server stores an object of at most 1.5 MiB, in
    which the spec and its own records count.

    Fields that only earlier attempts needed are left out; if it is still too large, the oldest records of attempts and
    plan changes too. The latest of each always stay.
    """
    attempts = [attempt.model_copy(update={"restarts_before": {}}) for attempt in status.attempts[:-1]]
    status = status.model_copy(update={"attempts": attempts + status.attempts[-1:]})
    while len(status.model_dump_json(by_alias=True, exclude_none=True).encode()) > MAX_STATUS_BYTES:
        attempts, changes = status.attempts, status.plan_changes
        if len(changes) > 1 and (len(attempts) <= 1 or changes[0].attempt <= attempts[0].number):
            status = status.model_copy(update={"plan_changes": changes[1:]})
        elif len(attempts) > 1:
            status = status.model_copy(update={"attempts": attempts[1:]})
        else:
            break
    return status


# --- Rate of writes ---


BURST = 10
SECONDS_PER_WRITE = 2.0


def write_budget() -> TokenBucket:
    """Return the budget of one job: BURST writes at once, then one in SECONDS_PER_WRITE.

    The reports of pods cause writes, and the operator makes them: without a limit, one job could load the API server
    past the limits of its pods' account. Every write takes a token. A write that decisions rest on does not wait for
    one.
    """
    return TokenBucket(BURST, SECONDS_PER_WRITE)
