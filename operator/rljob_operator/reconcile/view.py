"""An observation with its interpretation: the current attempt, its pods, the trainer's report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum, auto

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.job import RLJob, RLJobSpec, grown_spec
from rljob_api.memory_profile import MemoryProfile
from rljob_api.status import AttemptStatus, Condition, RLJobStatus, Role
from rljob_api.step_report import PendingExit, StepReportStatus
from rljob_operator.objects.pod_layout import PodLayout
from rljob_operator.reconcile.observed import Observed, ObservedPod
from rljob_operator.reconcile.trusted_state import trusted_status, usable_report
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


@dataclass(frozen=True, slots=True)
class JobView:
    """Input of the decisions of all stages."""

    observed: Observed
    job: RLJob
    settings: OperatorSettings
    now: datetime
    status: RLJobStatus
    """The stored status, corrected."""
    attempt: AttemptStatus | None
    """The latest."""
    pods: list[ObservedPod]
    """Of the latest attempt."""
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

    @property
    def spec(self) -> RLJobSpec:
        """The job's, with the policy's size in the memory plan: from it, pods and ranks follow."""
        return grown_spec(self.job.spec, self.status.plan)

    @property
    def layout(self) -> PodLayout:
        return PodLayout.of(self.spec)

    @property
    def own_trainer(self) -> bool:
        """RLJob's own trainer, with a controller pod; otherwise the image of `spec.trainer` in the policy's pods."""
        return self.spec.trainer is None

    @property
    def memory_profile(self) -> MemoryProfile | None:
        """Profile that RLJob's own trainer has reported."""
        return self.report.memory_profile if self.report else None

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


def build_view(observed: Observed, job: RLJob, settings: OperatorSettings, now: datetime) -> JobView:
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
