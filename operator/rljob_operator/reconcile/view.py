"""The view of a job for all decisions: its current attempt, pods and report, as far as they can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from functools import cached_property
from typing import Any, TypeVar

from pydantic import BaseModel

from rljob_api.conditions import ConditionType
from rljob_api.job import RLJob, RLJobSpec, grown_spec
from rljob_api.memory_facts import MemoryFacts
from rljob_api.status import MAX_ATTEMPTS_KEPT, AttemptStatus, Condition, RLJobStatus, Role, RolePods
from rljob_api.step_report import PendingExit, StepReportStatus
from rljob_operator.objects.pod_layout import PodLayout
from rljob_operator.reconcile.observed import ObservedJob, ObservedPod
from rljob_operator.settings import OperatorSettings


class Stage(Enum):
    """Stage of a job's lifecycle, derived from its status alone."""

    BETWEEN_ATTEMPTS = auto()
    """No attempt yet, or the latest has ended: the next one may start."""
    LIVE = auto()
    """An attempt has begun."""
    STOPPING = auto()
    """An attempt has a reason to end, and some of its pods still exist."""
    FINISHED = auto()
    """Complete or failed."""


@dataclass(frozen=True)
class JobView:
    """Input of the decisions of all stages."""

    observed: ObservedJob
    job: RLJob
    settings: OperatorSettings
    now: datetime
    status: RLJobStatus
    """The stored status, corrected."""
    attempt: AttemptStatus | None
    """The latest."""
    pods: list[ObservedPod]
    """Pods of the latest attempt."""
    leftovers: list[ObservedPod]
    """Pods of other attempts."""
    expected_pods: list[tuple[str, Role]]
    """Name and role of every pod of an attempt."""
    missing: list[str]
    """Names of missing pods of the latest attempt."""
    report: StepReportStatus | None
    """Report of the trainer, if it is usable."""
    report_problem: str | None
    """Reason why the StepReport is not usable."""
    not_restarted: list[ObservedPod]
    """Pods that the latest attempt takes over, whose containers have not restarted yet."""

    @cached_property
    def spec(self) -> RLJobSpec:
        """The job's, with the policy's size in the memory plan: from it, pods and ranks follow."""
        return grown_spec(self.job.spec, self.status.plan)

    @cached_property
    def layout(self) -> PodLayout:
        return PodLayout.of(self.spec)

    @property
    def own_trainer(self) -> bool:
        """RLJob's own trainer, with a controller pod; otherwise the image of `spec.trainer` in the policy's pods."""
        return self.spec.trainer is None

    @property
    def memory_facts(self) -> MemoryFacts | None:
        """Profile that RLJob's own trainer has reported."""
        return self.report.memory_facts if self.report else None

    @property
    def controller(self) -> ObservedPod | None:
        """The controller pod of the latest attempt."""
        return next((pod for pod in self.pods if pod.role == "controller"), None)

    @property
    def report_of_attempt(self) -> StepReportStatus | None:
        """Report of the latest attempt itself."""
        number = self.attempt.number if self.attempt else None
        return self.report if self.report and self.report.attempt == number else None

    @property
    def pending_exit(self) -> PendingExit | None:
        """Reason why the latest attempt cannot continue, if its controller waits for a changed plan."""
        waits = self.controller is not None and self.controller.end is None
        return self.report_of_attempt.pending_exit if waits and self.report_of_attempt else None

    @property
    def all_ready(self) -> bool:
        """All pods of the latest attempt exist and are ready."""
        return not self.missing and all(pod.ready for pod in self.pods)

    @property
    def stage(self) -> Stage:
        if is_finished(self.status):
            return Stage.FINISHED
        if self.attempt is None or self.attempt.end_time is not None:
            return Stage.BETWEEN_ATTEMPTS
        return Stage.LIVE if self.attempt.reason is None else Stage.STOPPING

    def condition(self, type_: ConditionType) -> Condition | None:
        return condition_of(self.status, type_)

    def holds(self, type_: ConditionType) -> bool:
        condition = self.condition(type_)
        return condition is not None and condition.status == "True"

    @property
    def begun(self) -> bool:
        """All pods of the attempt have existed: a missing pod is gone, and not still to be created."""
        return self.report_of_attempt is not None or self.holds(ConditionType.SCHEDULED)

    @property
    def committed_steps(self) -> int | None:
        """Committed steps: the maximum of the status, the StepReport and termination messages; None if unknown."""
        messages = [pod.end.message for pod in self.observed.pods if pod.end and pod.end.message]
        reported = [self.status.step, self.report.step if self.report else None]
        reported += [message.step for message in messages if (message.step or 0) <= self.spec.algorithm.steps]
        return max((step for step in reported if step is not None), default=None)

    @property
    def pods_by_role(self) -> list[RolePods]:
        """Pods of the latest attempt, or of the one that is about to begin."""
        expected = [role for _, role in self.expected_pods]
        ready = [pod.role for pod in self.pods if pod.ready and not pod.ended]
        return [
            RolePods(role=role, desired=expected.count(role), ready=min(ready.count(role), expected.count(role)))
            for role in dict.fromkeys(expected)
        ]


def build_view(observed: ObservedJob, job: RLJob, settings: OperatorSettings, now: datetime) -> JobView:
    report, problem = usable_report(observed, job.spec.algorithm.steps, now)
    status = _trusted_status(observed, report, now)
    attempt = status.attempts[-1] if status.attempts else None
    made_for = (attempt.pods_of_attempt or attempt.number) if attempt else None
    pods = [pod for pod in observed.pods if pod.attempt == made_for]
    restarting = [pod for pod in pods if _is_to_restart(pod, attempt)]
    names = {pod.name for pod in pods}
    expected = PodLayout.of(grown_spec(job.spec, status.plan)).pods(observed.name)
    return JobView(
        observed=observed,
        job=job,
        settings=settings,
        now=now,
        status=status,
        attempt=attempt,
        # The state of a container that has not restarted belongs to the attempt before.
        pods=[
            replace(pod, ready=False, end=pod.end if pod.ended else None) if pod in restarting else pod for pod in pods
        ],
        leftovers=[pod for pod in observed.pods if pod.attempt != made_for],
        expected_pods=expected,
        missing=[name for name, _ in expected if name not in names],
        report=report,
        report_problem=problem,
        not_restarted=restarting,
    )


def _is_to_restart(pod: ObservedPod, attempt: AttemptStatus | None) -> bool:
    if attempt is None or attempt.pods_of_attempt is None:
        return False
    return pod.restart_count <= attempt.restarts_before.get(pod.name, -1)


def condition_of(status: RLJobStatus, type_: ConditionType) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == type_), None)


def is_finished(status: RLJobStatus) -> bool:
    """Complete, or failed. A job with an invalid spec is not finished: it continues once the spec is fixed."""
    ends = (ConditionType.COMPLETE, ConditionType.FAILED)
    return any(condition.type in ends and condition.status == "True" for condition in status.conditions)


# --- What can be trusted of the stored status and of the StepReport ---


LARGEST_NUMBER = 1_000_000
"""Limit of an attempt or a generation: the operator continues the numbers that are reported."""
_CLOCKS_DIFFER_BY = timedelta(hours=1)
_EARLIEST = datetime.min.replace(tzinfo=UTC)


def _trusted_status(observed: ObservedJob, report: StepReportStatus | None, now: datetime) -> RLJobStatus:
    """Return the stored status without future times and impossible attempts, each attempt once, and that of the pods as
    the latest."""
    stored = observed.status
    by_number = {attempt.number: attempt for attempt in stored.attempts if attempt.number < LARGEST_NUMBER}
    attempts = [clip_times(attempt, _EARLIEST, now) for _, attempt in sorted(by_number.items())]
    attempts += _adopted_attempt(observed, max(by_number, default=0), report, now)
    times = {name: getattr(stored, name) for name in ("start_time", "completion_time", "update_time")}
    return stored.model_copy(
        update={
            **{name: _clip(time, _EARLIEST, now) for name, time in times.items()},
            "attempts": attempts[-MAX_ATTEMPTS_KEPT:],
            "conditions": [clip_times(condition, _EARLIEST, now) for condition in stored.conditions],
        }
    )


def _adopted_attempt(
    observed: ObservedJob, latest: int, report: StepReportStatus | None, now: datetime
) -> list[AttemptStatus]:
    """Return a record for an attempt after the `latest` that has pods and whose record was lost; usually none."""
    unknown = [pod for pod in observed.pods if pod.attempt > latest]
    if not unknown:
        return []
    stored, number = observed.status, max(pod.attempt for pod in unknown)
    committed = max(stored.step or 0, (report.step or 0) if report and report.attempt != number else 0)
    adopted = AttemptStatus(
        number=number,
        plan_generation=stored.plan.generation if stored.plan else 1,
        start_time=min(now, *(pod.created_at for pod in unknown)),
        from_step=committed + 1,
        restarts_before={pod.name: pod.restart_count for pod in unknown},
    )
    return [adopted]


def usable_report(observed: ObservedJob, steps: int, now: datetime) -> tuple[StepReportStatus | None, str | None]:
    """Return the report, or None and the error in it. An empty report has no error, and neither has one from before the
    first attempt that is known."""
    report = observed.step_report
    if observed.step_report_problem:
        return None, f"cannot parse the StepReport: {observed.step_report_problem}"
    recorded = [attempt.number for attempt in observed.status.attempts]
    latest = max([*recorded, *(pod.attempt for pod in observed.pods)], default=0)
    if report is None or report.attempt is None or latest == 0:
        return None, None
    wanted = max(steps, observed.status.steps or 0, observed.status.step or 0)
    if (report.step or 0) > wanted:
        return None, f"the StepReport has step {report.step}, but the job has {wanted} steps"
    if report.attempt > latest:
        return None, f"the StepReport has attempt {report.attempt}, but the latest is {latest}"
    if report.plan is not None and report.plan.generation > LARGEST_NUMBER:
        return None, f"the StepReport has plan generation {report.plan.generation}; at most {LARGEST_NUMBER} is valid"
    return clip_times(report, *possible_times(observed, now)), None


def first_attempt_number(observed: ObservedJob) -> int:
    """Return the number of the attempt after those that only the StepReport knows of, because the status was lost."""
    reported = observed.step_report.attempt if observed.step_report else None
    return reported + 1 if reported is not None and reported < LARGEST_NUMBER else 1


# --- Times and messages ---


def possible_times(observed: ObservedJob, now: datetime) -> tuple[datetime, datetime]:
    """Return the earliest and latest time that the job's pods can report."""
    return observed.created_at - _CLOCKS_DIFFER_BY, now + _CLOCKS_DIFFER_BY


Model = TypeVar("Model", bound=BaseModel)


def clip_times(model: Model, earliest: datetime, latest: datetime) -> Model:
    """Return `model` with every time in it, at any depth, between the bounds and in a time zone."""
    clipped = {name: _clip(value, earliest, latest) for name, value in model}
    changed = {name: value for name, value in clipped.items() if value is not getattr(model, name)}
    return model.model_copy(update=changed) if changed else model


def _clip(value: Any, earliest: datetime, latest: datetime) -> Any:
    match value:
        case datetime():
            return max(earliest, min(value if value.tzinfo else value.replace(tzinfo=UTC), latest))
        case BaseModel():
            return clip_times(value, earliest, latest)
        case list() if any(isinstance(element, BaseModel) for element in value):
            return [_clip(element, earliest, latest) for element in value]
    return value


def and_more(pods: Sequence[ObservedPod]) -> str:
    """Return ` (and 2 more)` for a message about the first of three pods; empty for one pod."""
    return f" (and {len(pods) - 1} more)" if len(pods) > 1 else ""


def elapsed_seconds(since: datetime, now: datetime) -> float:
    """Return the seconds from `since` to `now`. Never negative: another machine's clock may be ahead."""
    return max(0.0, (now - since).total_seconds())


def soonest(*seconds_left: float | None) -> float | None:
    """Return the smallest number that is not None; None if there is none."""
    return min((seconds for seconds in seconds_left if seconds is not None), default=None)
