"""Giving up, in words: what happened last, what was tried, what each change freed, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rljob_api.plan_change import PlanChange
from rljob_memory.diagnosis import FailureClass
from rljob_memory.evidence.sizes import human_bytes
from rljob_memory.recovery.case import Case
from rljob_memory.recovery.latitude import GiveUp, GiveUpReason


def give_up(reason: GiveUpReason, why: str, case: Case, advice: Iterable[str] = ()) -> GiveUp:
    """`why`: the reason as a sentence. `advice`: what to write in the manifest; without any, the class's own."""
    lines = list(dict.fromkeys(advice)) or [advice_of(case.failure_class)]
    return GiveUp(
        reason,
        f"{case.diagnosis.class_name}: {_sentence(case.diagnosis.message)} "
        f"{_sentence(why)} {_tried(case.history.changes)} To go on: {' '.join(map(_sentence, lines))}",
    )


def advice_of(failure_class: FailureClass) -> str:
    """What an RLJob's manifest can change; what is for other trainers is left out."""
    return failure_class.advice.partition(" Elsewhere:")[0]


def _tried(changes: Sequence[PlanChange]) -> str:
    if not changes:
        return "No change of the plan was tried."
    return f"Tried: {'; '.join(_line(change) for change in changes)}."


def _line(change: PlanChange) -> str:
    remedy = change.remedy
    place = f"step {change.step}" + (f", {change.phase}" if change.phase else ", start")
    return (
        f"generation {change.generation} ({place}, {change.diagnosis.class_name}): {remedy.setting} {remedy.before} → "
        f"{remedy.after}, {_expected(remedy.expected_bytes)}, {_seen(change)}"
    )


def _expected(expected: int | None) -> str:
    return "effect not estimated" if expected is None else f"expected {human_bytes(expected)}"


def _seen(change: PlanChange) -> str:
    observed = change.remedy.observed_bytes
    if observed is None:
        return "failed again" if change.seconds_to_recover is None else "effect not measured"
    return f"observed {human_bytes(observed)}" if observed >= 0 else f"observed {human_bytes(-observed)} more in use"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
