"""`decide`: which one setting of the memory plan to change after a failure, or that nothing is left to change. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import DiagnosisStatus, RemedyStatus
from rljob_api.step_report import Evidence, MemoryPressure
from rljob_memory.diagnosis import FailureClass
from rljob_memory.evidence.sizes import human_bytes
from rljob_memory.recovery.account import advice_of, give_up
from rljob_memory.recovery.case import Case
from rljob_memory.recovery.diagnosed import diagnosed
from rljob_memory.recovery.history import History
from rljob_memory.recovery.ladder import Ladder, Rung, best, ladder_of
from rljob_memory.recovery.latitude import GiveUp, GiveUpReason, Latitude, Remedy
from rljob_memory.recovery.plan_text import text_of

MOST_CHANGES_WITHOUT_PROGRESS = 10
"""So many failed changes in a row, without a step between them, are a loop, however large the budget is."""

_OWN_REMEDY_ONLY = frozenset({FailureClass.RETAINED_GRAPH})
"""Everything else but its own remedy only delays the end: where that one is pinned, the user has to know."""


def decide(evidence: Evidence, plan: MemoryPlan, history: History, latitude: Latitude) -> Remedy | GiveUp:
    """One change of `plan`, the one in force, that acts on the cause of the failure; or why there is none.

    The likeliest cause comes first. Of the changes that act on it, the cheapest level's is taken that covers most of
    what was missing. Where nothing acts on it any more, the next cause is asked, then whatever frees memory at all.
    A pinned setting is never changed, a plan never tried twice. What is beyond the caller is left to its supervisor.
    """
    cases = list(_cases(diagnosed(evidence, plan), plan, history, latitude))
    if ended := _not_to_be_changed(cases[0]):
        return ended
    ladders: list[Ladder] = []
    for case in cases:
        ladder = ladder_of(case)
        ladders.append(ladder)
        if ladder.reachable:
            return _remedy(case, best(ladder.reachable, case.need_bytes))
        if ladder.rungs and latitude.supervised:
            return give_up(GiveUpReason.LEFT_TO_SUPERVISOR, _beyond(ladder), case)
        if ladder.pinned and case.failure_class in _OWN_REMEDY_ONLY:
            break
    return _nothing_left(cases[0], ladders)


def prevent(pressure: MemoryPressure, plan: MemoryPlan, history: History, latitude: Latitude) -> Remedy | None:
    """A live change of `plan` that acts on the failure to come; None where there is none. It costs no adjustment."""
    if latitude.settings.mode == "Disabled":
        return None
    failure_class = class_of(pressure.diagnosis)
    case = Case(
        failure_class,
        pressure.diagnosis,
        frozenset({failure_class}),
        pressure.role,
        None,
        plan,
        history,
        replace(latitude, levels=latitude.levels & {"Live"}),
        process_lives=True,
    )
    reachable = ladder_of(case).reachable
    return _remedy(case, best(reachable, None)) if reachable else None


def class_of(diagnosis: DiagnosisStatus) -> FailureClass:
    """`Unknown` for a class that this version does not know."""
    name = diagnosis.class_name
    return FailureClass(name) if name in set(FailureClass) else FailureClass.UNKNOWN


def _cases(evidence: Evidence, plan: MemoryPlan, history: History, latitude: Latitude) -> Iterator[Case]:
    """The failure by each of its diagnoses, and at last as one of which nothing is known but that memory ran out."""
    cases = [
        Case(
            class_of(diagnosis),
            diagnosis,
            frozenset(class_of(each) for each in evidence.diagnoses),
            evidence.role,
            evidence.phase,
            plan,
            history,
            latitude,
            message=evidence.message,
            device_free_bytes=evidence.memory.device_free_bytes if evidence.memory else None,
        )
        for diagnosis in evidence.diagnoses
    ]
    yield from cases
    if _settings_can_help(cases[0]):
        yield replace(cases[0], failure_class=FailureClass.UNKNOWN)


def _settings_can_help(case: Case) -> bool:
    """On a CPU models and caches lie in host memory; nothing but their own remedies helps the rest of it."""
    if case.failure_class is FailureClass.HOST_MEMORY:
        return not case.on_gpu
    return case.failure_class is not FailureClass.SHARED_MEMORY


def _not_to_be_changed(case: Case) -> GiveUp | None:
    history, recovery = case.history, case.latitude.recovery
    if case.latitude.settings.mode == "Disabled":
        why = "The plan stays as it is: memory.mode is Disabled"
        return give_up(GiveUpReason.PINNED_SETTING_CONFLICT, why, case, ["Write memory.mode: Auto"])
    if history.adjustments >= recovery.max_adjustments:
        ladder = ladder_of(case)
        why = f"All changes of the plan are used up: recovery.maxAdjustments is {recovery.max_adjustments}"
        advice = [*ladder.pinned, *ladder.bounded, "Raise recovery.maxAdjustments", advice_of(case.failure_class)]
        return give_up(GiveUpReason.ADJUSTMENTS_EXHAUSTED, why, case, advice)
    if history.changes_since_progress >= MOST_CHANGES_WITHOUT_PROGRESS:
        why = f"After {history.changes_since_progress} changes of the plan in a row, still no step was done"
        return give_up(GiveUpReason.NO_PROGRESS, why, case)
    return None


def _nothing_left(case: Case, ladders: list[Ladder]) -> GiveUp:
    pinned = [line for ladder in ladders for line in ladder.pinned]
    bounded = [line for ladder in ladders for line in ladder.bounded]
    if pinned:
        why = "A pinned setting stands in the way"
        return give_up(GiveUpReason.PINNED_SETTING_CONFLICT, why, case, [*pinned, *bounded])
    return give_up(GiveUpReason.NOTHING_LEFT, "No change of the plan is left that acts on it", case, bounded)


def _beyond(ladder: Ladder) -> str:
    return f"What acts on it takes more than this process can do: {ladder.rungs[0].change.words}"


def _remedy(case: Case, rung: Rung) -> Remedy:
    assert rung.level is not None, "only what the caller can do is chosen"
    family, change, generation = rung.family, rung.change, case.plan.generation + 1
    changed = {family.setting: change.value} if family.of_the_plan else {}
    status = RemedyStatus(
        setting=family.name,
        before=family.text_in(case.plan),
        after=text_of(change.value),
        expected_bytes=change.expected_bytes,
    )
    frees = ""
    if change.expected_bytes and not change.gives_more:
        frees = f", expected to free {human_bytes(change.expected_bytes)}"
    return Remedy(
        case.plan.model_copy(update={**changed, "generation": generation}),
        status,
        rung.level,
        case.diagnosis,
        f"{change.words} (generation {generation}{frees})",
        rung.respawn,
    )
