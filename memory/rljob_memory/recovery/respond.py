"""`respond`: the decision after a failure. Pure: the caller observes the failure before, and acts on the answer after.

1. A failure that would repeat itself is given up.
2. After an out-of-memory failure one setting of the memory plan changes. The likeliest cause comes first; of the
   changes that act on it, the one at the cheapest level that covers most of the missing memory. Without any, the next
   cause is tried, then everything that frees memory. A pinned setting never changes; no plan is tried twice.
3. If no change is left or allowed, the policy gets more GPUs, within `recovery.maxGpus`.
4. Every other failure, and one that no change could help, is answered by a restart, as long as restarts are left: of
   the lost process alone if its peers work on, else of the whole attempt.

A supervised caller gets the changes that it can carry out, and leaves everything else to its supervisor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import DiagnosisStatus, PlanChange, RemedyStatus, Role
from rljob_api.roles import LoraSpec
from rljob_api.step_report import Evidence, MemoryPressure
from rljob_memory.budget import budget
from rljob_memory.diagnosis import FailureClass
from rljob_memory.model_shape import with_adapters
from rljob_memory.plan_settings import host_memory_setting, planned_host_memory
from rljob_memory.recovery import messages
from rljob_memory.recovery.constraints import Constraints
from rljob_memory.recovery.failure import Case, Changed, FailureReport, GiveUp, GiveUpReason, Response, Restart
from rljob_memory.recovery.ladder import Ladder, Rung, best, ladder_of, last_resort
from rljob_memory.recovery.pod_limits import larger_limit
from rljob_memory.recovery.remedies import POLICY_GPUS
from rljob_memory.recovery.state import ENGINE_PROCESSES, POLICY_PROCESSES, RecoveryState, counts
from rljob_memory.trend import RECYCLE_STEPS, RESIZE_STEPS
from rljob_memory.workload import MOMENT_BYTES

MOST_CHANGES_WITHOUT_PROGRESS = 10
"""More changes in a row, without a committed step between them, are a loop, however large the budget is."""

_ONLY_OWN_REMEDY = frozenset({FailureClass.RETAINED_GRAPH})
"""Every remedy but its own only delays the next failure: if its own is pinned, the user has to know."""


def respond(report: FailureReport, state: RecoveryState, constraints: Constraints) -> Response:
    """The answer to a failure."""
    if report.final is not None:
        return GiveUp(report.final, report.message)
    if report.evidence is None and report.peers_work_on and (replaced := _replaced(report, state, constraints)):
        return replaced
    if report.evidence is None:
        return _restart(report.message, report, state, constraints)
    answer: Changed | GiveUp = GiveUp(GiveUpReason.NOTHING_LEFT, report.advice)
    if state.plan is not None:
        answer = _change(report, report.evidence, state, constraints)
    if isinstance(answer, GiveUp) and constraints.is_supervised:
        return replace(answer, reason=GiveUpReason.LEFT_TO_SUPERVISOR)
    if isinstance(answer, GiveUp) and answer.reason is GiveUpReason.NOTHING_LEFT and constraints.can_replace_pods:
        # Memory also runs out for causes outside the job, which new pods may not meet.
        more = f"; {answer.explanation}" if answer.explanation else ""
        return _restart(f"{report.message.rstrip('. ')}{more}", report, state, constraints)
    return answer


def prevent(
    pressure: MemoryPressure, state: RecoveryState, constraints: Constraints, *, attempt: int, step: int, time: datetime
) -> Changed | None:
    """A change before `step` that acts on the failure to come: of live processes, or, in the last steps before it, new
    processes of the role whose memory grows. None if there is none.

    It costs no adjustment.
    """
    if state.plan is None or not constraints.may_change_plan:
        return None
    case = Case(
        class_of(pressure.diagnosis),
        pressure.diagnosis,
        pressure.role,
        phase=None,
        state=state,
        constraints=replace(constraints, levels=constraints.levels & {"Live", "RespawnRole"}),
        dead=frozenset(),
        is_preventive=True,
    )
    is_due = pressure.steps_left <= RECYCLE_STEPS
    cheap = [
        rung
        for rung in ladder_of(case).reachable
        if rung.level == "Live" or (is_due and rung.remedy.setting in (ENGINE_PROCESSES, POLICY_PROCESSES))
    ]
    if not cheap:
        return None
    return _changed(case, best(cheap, None), _Place(attempt, step, pressure.rank, time))


def more_host_memory(pressure: MemoryPressure, state: RecoveryState, constraints: Constraints) -> MemoryPlan | None:
    """The plan with a larger memory limit for the pods like the one that is about to reach its limit; None if it is not
    due, or not allowed.

    The generation stays: it counts the changes that processes adopt, and a trainer counts them at the same time.
    """
    failure_class = class_of(pressure.diagnosis)
    is_due = failure_class is FailureClass.HOST_MEMORY and pressure.steps_left <= RESIZE_STEPS
    if state.plan is None or not constraints.may_change_plan or not is_due:
        return None
    case = Case(failure_class, pressure.diagnosis, pressure.role, None, state, constraints, frozenset())
    if (planned_host_memory(state.plan, pressure.role) or 0) > (case.number("limit_bytes") or 0):
        return None  # the limit was raised after the report
    limit = larger_limit(case)
    return None if limit is None else state.plan.model_copy(update={host_memory_setting(pressure.role): limit})


def class_of(diagnosis: DiagnosisStatus) -> FailureClass:
    """The class of `diagnosis`; `Unknown` if this version does not know it."""
    name = diagnosis.class_name
    return FailureClass(name) if name in set(FailureClass) else FailureClass.UNKNOWN


# --- new processes under the same plan ---


def _replaced(report: FailureReport, state: RecoveryState, constraints: Constraints) -> Restart | None:
    """A new process for the lost one; None if the caller cannot start it, or no restart is left."""
    most = constraints.recovery.max_restarts
    if "RespawnRole" not in constraints.levels or state.effective_restarts >= most:
        return None
    after = state.with_replacement()
    message = messages.with_count(report.message, "restart", after.restarts, most)
    return Restart(after, report.message, message, of_one_process=True)


def _restart(cause: str, report: FailureReport, state: RecoveryState, constraints: Constraints) -> Restart | GiveUp:
    if constraints.is_supervised:
        return GiveUp(GiveUpReason.LEFT_TO_SUPERVISOR, cause)
    most = constraints.recovery.max_restarts
    if state.effective_restarts >= most:
        explanation = messages.restarts_exhausted_message(report.attempt, cause, report.earlier_failures, most)
        return GiveUp(GiveUpReason.RESTARTS_EXHAUSTED, explanation)
    unproductive = report.message if report.is_repeatable and not state.attempt_committed_steps else ""
    if unproductive and unproductive == state.failure_without_progress:
        return GiveUp(GiveUpReason.NO_PROGRESS, messages.repeated_failure_message(cause))
    after = state.with_restart(unproductive)
    return Restart(after, cause, messages.with_count(cause, "restart", after.restarts, most))


# --- a changed plan ---


@dataclass(frozen=True, slots=True)
class _Place:
    """Place and time of a failure, for the record of the change."""

    attempt: int
    step: int
    rank: int
    time: datetime


def _change(
    report: FailureReport, evidence: Evidence, state: RecoveryState, constraints: Constraints
) -> Changed | GiveUp:
    cases = list(_cases(evidence, report.dead, state, constraints))
    place = _Place(evidence.attempt, evidence.step, evidence.rank, report.time)
    if given_up := _not_to_be_changed(cases[0], report):
        return _grown(cases[0], place) or given_up
    ladders: list[Ladder] = []
    for case in cases:
        ladder = ladder_of(case)
        ladders.append(ladder)
        if ladder.reachable:
            return _changed(case, best(ladder.reachable, case.need_bytes), place)
        if ladder.rungs and constraints.is_supervised:
            why = f"{ladder.rungs[0].remedy.name} would help, but this process cannot make that change"
            return _give_up(GiveUpReason.LEFT_TO_SUPERVISOR, why, case)
        if ladder.pinned and case.failure_class in _ONLY_OWN_REMEDY:
            break
    return _grown(cases[0], place) or _nothing_left(cases[0], ladders)


def _grown(case: Case, place: _Place) -> Changed | None:
    """A larger policy. It counts against `recovery.maxGpus` alone."""
    rung = last_resort(case) if case.constraints.may_change_plan else None
    return None if rung is None else _changed(case, rung, place)


def _cases(evidence: Evidence, dead: frozenset[Role], state: RecoveryState, constraints: Constraints) -> Iterator[Case]:
    """A case for each diagnosis of the failure, and a last one whose class is Unknown: memory ran out."""
    assert evidence.diagnoses, "evidence comes with its diagnoses"
    cases = [
        Case(
            class_of(diagnosis),
            diagnosis,
            evidence.role,
            evidence.phase,
            state,
            constraints,
            dead,
            message=evidence.message,
            device_free_bytes=evidence.memory.device_free_bytes if evidence.memory else None,
        )
        for diagnosis in evidence.diagnoses
    ]
    yield from cases
    if _settings_can_help(cases[0]):
        yield replace(cases[0], failure_class=FailureClass.UNKNOWN)


def _settings_can_help(case: Case) -> bool:
    """True if a setting can help: never with /dev/shm; with host memory only on a CPU, which has models there."""
    if case.failure_class is FailureClass.HOST_MEMORY:
        return not case.on_gpu
    return case.failure_class is not FailureClass.SHARED_MEMORY


def _not_to_be_changed(case: Case, report: FailureReport) -> GiveUp | None:
    state, recovery = case.state, case.constraints.recovery
    if not case.constraints.may_change_plan:
        why = "The memory plan is not changed: memory.mode is Disabled"
        return _give_up(GiveUpReason.NOTHING_LEFT, why, case, ["Write memory.mode: Auto", report.advice])
    if state.effective_adjustments >= recovery.max_adjustments:
        ladder = ladder_of(case)
        why = f"All changes of the memory plan are used: recovery.maxAdjustments is {recovery.max_adjustments}"
        bounds = [*ladder.pinned, *ladder.bounded, *_bound_of_growth(case)]
        advice = [*bounds, "Raise recovery.maxAdjustments", _own_advice(case)]
        return _give_up(GiveUpReason.ADJUSTMENTS_EXHAUSTED, why, case, advice)
    if state.changes_since_progress >= MOST_CHANGES_WITHOUT_PROGRESS:
        why = f"No step was committed after {state.changes_since_progress} changes of the memory plan in a row"
        return _give_up(GiveUpReason.NO_PROGRESS, why, case, _bound_of_growth(case))
    return None


def _nothing_left(case: Case, ladders: list[Ladder]) -> GiveUp:
    pinned = [line for ladder in ladders for line in ladder.pinned]
    bounded = [line for ladder in ladders for line in ladder.bounded] + _bound_of_growth(case)
    if pinned:
        why = "A pinned setting prevents the change that would help"
        return _give_up(GiveUpReason.PINNED_SETTING_CONFLICT, why, case, [*pinned, *bounded])
    return _give_up(GiveUpReason.NOTHING_LEFT, "No change of the memory plan is left that could help", case, bounded)


def _bound_of_growth(case: Case) -> list[str]:
    line = POLICY_GPUS.bound(case)
    return [] if line is None else [line]


def _give_up(reason: GiveUpReason, why: str, case: Case, advice: list[str] | None = None) -> GiveUp:
    """`advice`: changes of the manifest; without any, the advice for the class."""
    lines = advice or [_own_advice(case)]
    lines = [*lines, _smaller_job_advice(case)]
    return GiveUp(reason, messages.explanation(why, case.diagnosis, case.state.changes, lines))


def _changed(case: Case, rung: Rung, place: _Place) -> Changed:
    assert rung.level is not None, "only a change that the caller can carry out is chosen"
    remedy = rung.remedy
    changed = remedy.fields_changed(case, rung.value)
    plan = case.plan.model_copy(update={**changed, "generation": case.plan.generation + 1})
    change = PlanChange(
        generation=plan.generation,
        time=place.time,
        attempt=place.attempt,
        step=place.step,
        phase=case.phase,
        role=case.role,
        rank=place.rank,
        diagnosis=case.diagnosis,
        remedy=RemedyStatus(
            setting=remedy.name,
            before=remedy.text_of(remedy.value_before(case)),
            after=remedy.text_of(rung.value),
            expected_bytes=rung.expected_bytes,
        ),
        level=rung.level,
        preventive=case.is_preventive,
    )
    state = case.state.with_change(change, plan)
    message = messages.recovering_message(change)
    if counts(change):
        most = case.constraints.recovery.max_adjustments
        message = messages.with_count(message, "adjustment", state.adjustments, most)
    return Changed(change, plan, state, rung.renew, message)


# Advice when recovery gives up: settings of this job, and those that only another job can have. Pure.

_MOMENTS, _ADAPTERS = "policy.optimizer.moments: bfloat16", "policy.lora"
_HELPING = {
    FailureClass.ACTIVATION_SPIKE: (_MOMENTS, _ADAPTERS),
    FailureClass.MODEL_WEIGHTS: (_ADAPTERS,),
    FailureClass.OPTIMIZER_STATE: (_MOMENTS, _ADAPTERS),
}
_SMALLEST_PART = 50
"""A saving of less than this part of a GPU is not worth another job."""


def _own_advice(case: Case) -> str:
    """The settings of this job that help, without one that frees nothing."""
    of_class = case.failure_class.own_advice
    if case.failure_class is not FailureClass.OPTIMIZER_STATE or case.setup is None:
        return of_class
    offers = {rung.remedy.setting for rung in ladder_of(case).rungs}
    return of_class if "optimizer_offload" in offers else messages.MORE_POLICY_GPUS


def _smaller_job_advice(case: Case) -> str:
    """Message with the bytes of one GPU that each setting would save at the end of an update; empty if none would
    save as much as the failure lacked, or if that is not known."""
    setup = case.setup
    if setup is None or not case.on_gpu or not (case.role == "policy" or case.shares_gpu):
        return ""
    smaller = {_MOMENTS: setup.with_work(moment_bytes=min(setup.work.moment_bytes, MOMENT_BYTES["bfloat16"]))}
    if not setup.model.adapter_parameters:
        smaller[_ADAPTERS] = replace(setup, model=with_adapters(setup.model, LoraSpec().rank))
    least = max(setup.hardware.device_memory_bytes // _SMALLEST_PART, case.need_bytes or 0)
    needed = budget(setup, case.plan).total("gpu", "optimizer")
    saved = {setting: needed - budget(job, case.plan).total("gpu", "optimizer") for setting, job in smaller.items()}
    helping = [(each, saved[each]) for each in _HELPING.get(case.failure_class, ()) if saved.get(each, 0) >= least]
    return messages.smaller_job_message(helping) if helping else ""
