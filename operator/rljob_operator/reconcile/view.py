"""The view of a job for all decisions: its current attempt, pods and report, as far as they can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from functools import cached_property

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.job import RLJob, RLJobSpec, grown_spec
from rljob_api.memory_facts import MemoryFacts
from rljob_api.status import MAX_ATTEMPTS_KEPT, AttemptStatus, Condition, RLJobStatus, Role, RolePods
from rljob_api.step_report import Evidence, PendingExit, StepReportStatus
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

    def holds(self, type_: ConditionType) -> bool:
        condition = condition_of(self.status, type_)
        return condition is not None and condition.status == "True"

    @property
    def begun(self) -> bool:
        """All pods of the attempt have existed: a missing pod is gone, and not still to be created."""
        return self.report_of_attempt is not None or self.holds(ConditionType.SCHEDULED)

    @property
    def committed_steps(self) -> int | None:
        """Committed steps: the maximum of the status, the StepReport and termination messages; None if unknown."""
        reported = [self.status.step, self.report.step if self.report else None]
        for pod in self.observed.pods:
            if pod.end and pod.end.message and (pod.end.message.step or 0) <= self.spec.algorithm.steps:
                reported.append(pod.end.message.step)
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
    status = trusted_status(observed.status, observed.pods, report, now)
    attempt = status.attempts[-1] if status.attempts else None
    made_for = (attempt.pods_of_attempt or attempt.number) if attempt else None
    old = [pod for pod in observed.pods if pod.attempt == made_for and _is_to_restart(pod, attempt)]
    restarting = {pod.uid for pod in old}
    pods = [
        _as_before_its_restart(pod) if pod.uid in restarting else pod
        for pod in observed.pods
        if pod.attempt == made_for
    ]
    names = {pod.name for pod in pods}
    expected = PodLayout.of(grown_spec(job.spec, status.plan)).pods(observed.name)
    return JobView(
        observed=observed,
        job=job,
        settings=settings,
        now=now,
        status=status,
        attempt=attempt,
        pods=pods,
        leftovers=[pod for pod in observed.pods if pod.attempt != made_for],
        expected_pods=expected,
        missing=[name for name, _ in expected if name not in names],
        report=report,
        report_problem=problem,
        not_restarted=old,
    )


def _is_to_restart(pod: ObservedPod, attempt: AttemptStatus | None) -> bool:
    if attempt is None or attempt.pods_of_attempt is None:
        return False
    return pod.restart_count <= attempt.restarts_before.get(pod.name, -1)


def _as_before_its_restart(pod: ObservedPod) -> ObservedPod:
    """The pod without the state of its container, which belongs to the attempt before."""
    return replace(pod, ready=False, end=pod.end if pod.ended else None)


def condition_of(status: RLJobStatus, type_: ConditionType) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == type_), None)


def is_finished(status: RLJobStatus) -> bool:
    """Complete, or failed. A job with an invalid spec is not finished: it continues once the spec is fixed."""
    complete, failed = (condition_of(status, type_) for type_ in (ConditionType.COMPLETE, ConditionType.FAILED))
    if complete and complete.status == "True":
        return True
    return failed is not None and failed.status == "True" and failed.reason != ConditionReason.INVALID_SPEC


# --- What can be trusted of the stored status and of the StepReport ---


def trusted_status(
    stored: RLJobStatus, pods: Sequence[ObservedPod], report: StepReportStatus | None, now: datetime
) -> RLJobStatus:
    """`stored` without future times and impossible attempts, each attempt once, and that of the pods as the latest."""
    attempts = _adopt(_in_order(stored.attempts, now), stored, pods, report, now)
    return stored.model_copy(
        update={
            "attempts": attempts[-MAX_ATTEMPTS_KEPT:],
            "conditions": [_not_in_future(condition, now) for condition in stored.conditions],
            **{name: _past(getattr(stored, name), now) for name in ("start_time", "completion_time", "update_time")},
        }
    )


def _in_order(attempts: Sequence[AttemptStatus], now: datetime) -> list[AttemptStatus]:
    # Pods of an attempt beyond that would not be recognized.
    by_number = {attempt.number: attempt for attempt in attempts if attempt.number < LARGEST_NUMBER}
    return [
        attempt.model_copy(
            update={"start_time": _past(attempt.start_time, now), "end_time": _past(attempt.end_time, now)}
        )
        for _, attempt in sorted(by_number.items())
    ]


def _adopt(
    attempts: list[AttemptStatus],
    stored: RLJobStatus,
    pods: Sequence[ObservedPod],
    report: StepReportStatus | None,
    now: datetime,
) -> list[AttemptStatus]:
    """Add a record for an attempt that has pods and whose record was lost."""
    known = attempts[-1].number if attempts else 0
    unknown = [pod for pod in pods if pod.attempt > known]
    if not unknown:
        return attempts
    number = max(pod.attempt for pod in unknown)
    committed = max(stored.step or 0, (report.step or 0) if report and report.attempt != number else 0)
    adopted = AttemptStatus(
        number=number,
        plan_generation=stored.plan.generation if stored.plan else 1,
        start_time=min(now, *(pod.created_at for pod in unknown)),
        from_step=committed + 1,
        restarts_before={pod.name: pod.restart_count for pod in unknown},
    )
    return [*attempts, adopted]


def _not_in_future(condition: Condition, now: datetime) -> Condition:
    return condition.model_copy(update={"last_transition_time": _past(condition.last_transition_time, now)})


def _past(time: datetime | None, now: datetime) -> datetime | None:
    if time is None:
        return None
    return min(time if time.tzinfo else time.replace(tzinfo=UTC), now)


LARGEST_NUMBER = 1_000_000
"""Limit of an attempt or a generation: the operator continues the numbers that are reported."""

_CLOCKS_DIFFER_BY = timedelta(hours=1)


def possible_times(observed: ObservedJob, now: datetime) -> tuple[datetime, datetime]:
    """Earliest and latest time that the job's pods can report."""
    return observed.created_at - _CLOCKS_DIFFER_BY, now + _CLOCKS_DIFFER_BY


def usable_report(observed: ObservedJob, steps: int, now: datetime) -> tuple[StepReportStatus | None, str | None]:
    """The report, or None and the error in it. An empty report has no error, and neither has one from before the first
    attempt that is known."""
    report = observed.step_report
    if observed.step_report_problem:
        return None, f"cannot parse the StepReport: {observed.step_report_problem}"
    if report is None or report.attempt is None:
        return None, None
    latest = _latest_attempt(observed)
    if latest == 0:
        return None, None
    wanted = max(steps, observed.status.steps or 0, observed.status.step or 0)
    if (report.step or 0) > wanted:
        return None, f"the StepReport has step {report.step}, but the job has {wanted} steps"
    if report.attempt > latest:
        return None, f"the StepReport has attempt {report.attempt}, but the latest is {latest}"
    if report.plan is not None and report.plan.generation > LARGEST_NUMBER:
        return None, f"the StepReport has plan generation {report.plan.generation}; at most {LARGEST_NUMBER} is valid"
    return _with_possible_times(report, *possible_times(observed, now)), None


def first_attempt_number(observed: ObservedJob) -> int:
    """Number of the attempt after those that only the StepReport knows of, because the status was lost."""
    reported = observed.step_report.attempt if observed.step_report else None
    return reported + 1 if reported is not None and reported < LARGEST_NUMBER else 1


def _latest_attempt(observed: ObservedJob) -> int:
    """0 if there is neither a record of an attempt nor a pod."""
    recorded = [attempt.number for attempt in observed.status.attempts]
    return max([*recorded, *(pod.attempt for pod in observed.pods)], default=0)


def _with_possible_times(report: StepReportStatus, earliest: datetime, latest: datetime) -> StepReportStatus:
    """The report with its times between `earliest` and `latest`."""
    return report.model_copy(
        update={
            "update_time": report.update_time and clipped_time(report.update_time, earliest, latest),
            "last_evidence": report.last_evidence and with_possible_time(report.last_evidence, earliest, latest),
            "plan_changes": [
                change.model_copy(update={"time": clipped_time(change.time, earliest, latest)})
                for change in report.plan_changes
            ],
        }
    )


def with_possible_time(evidence: Evidence, earliest: datetime, latest: datetime) -> Evidence:
    return evidence.model_copy(update={"time": clipped_time(evidence.time, earliest, latest)})


def clipped_time(time: datetime, earliest: datetime, latest: datetime) -> datetime:
    """`time`, or the nearer of the bounds. A time that is not clipped can be converted to any time zone."""
    return max(earliest, min(time, latest))


# --- Time, in seconds ---


def elapsed_seconds(since: datetime, now: datetime) -> float:
    """Seconds from `since` to `now`. Never negative: another machine's clock may be ahead."""
    return max(0.0, (now - since).total_seconds())


def soonest(*seconds_left: float | None) -> float | None:
    """The smallest number that is not None; None if there is none."""
    return min((seconds for seconds in seconds_left if seconds is not None), default=None)
