"""Messages about failures, changes of the memory plan, recoveries and warnings: the same in Events and in terminals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import DiagnosisStatus, Phase, PlanChange, RemedyStatus, Role
from rljob_api.quantity import quantity_bytes
from rljob_api.step_report import MemoryPressure
from rljob_memory.diagnosis import FailureClass
from rljob_memory.plan_settings import is_size, texts_of
from rljob_memory.recovery.state import ENGINE_PROCESSES, POLICY_PROCESSES, PROCESSES
from rljob_memory.sizes import human_bytes

_LABELS = {
    "policy_cache_bytes": "in the policy's cache",
    "requested_bytes": "requested",
    "wanted_bytes": "requested",
    "needed_bytes": "needed",
    "available_bytes": "available",
    "free_bytes": "free",
    "limit_bytes": "allowed",
}
"""Numbers of a diagnosis that a message names, in this order."""
_MOST_NUMBERS = 2
_HELD_BY_OTHERS = {"other_processes_bytes": "held by other processes"}
_LABELS_OF_CLASS: dict[str, dict[str, str]] = {
    FailureClass.FRAGMENTATION: {"reserved_but_unallocated_bytes": "reserved but unusable"},
    FailureClass.FOREIGN_PROCESS: _HELD_BY_OTHERS,
    FailureClass.CONTROLLER_CONTEXT: _HELD_BY_OTHERS,
    FailureClass.ENGINE_NOT_ASLEEP: _HELD_BY_OTHERS,
}
"""Numbers that only matter to one class, named first."""

# --- a failure ---


def process_name(role: Role, rank: int) -> str:
    return "the controller" if role == "controller" else f"{role} rank {rank}"


def out_of_memory_message(role: Role, rank: int, phase: Phase | None, step: int, diagnosis: DiagnosisStatus) -> str:
    """`policy rank 0 in update, step 41: Fragmentation (6.10 GiB reserved but unusable, 2.40 GiB requested)`."""
    place = f"in {phase}, step {step}" if phase else f"at startup, step {step}"
    labels = _LABELS_OF_CLASS.get(diagnosis.class_name, {}) | _LABELS
    named = [
        f"{human_bytes(diagnosis.numbers[name])} {label}" for name, label in labels.items() if name in diagnosis.numbers
    ]
    numbers = f" ({', '.join(named[:_MOST_NUMBERS])})" if named else ""
    return f"{process_name(role, rank)} {place}: {diagnosis.class_name}{numbers}"


def pressure_message(pressure: MemoryPressure) -> str:
    """`policy rank 0 is projected to run out of memory in 12 steps: RetainedGraph: …`."""
    left = pressure.steps_left
    steps = f"in {left} step{'' if left == 1 else 's'}" if left else "in this step"
    process = process_name(pressure.role, pressure.rank)
    return f"{process} is projected to run out of memory {steps}: {_cause(pressure.diagnosis)}"


# --- a change and its effect ---

_RESTARTED = {PROCESSES: "processes", ENGINE_PROCESSES: "the engines", POLICY_PROCESSES: "the policy's processes"}


def setting_message(remedy: RemedyStatus) -> str:
    """`kvCache 16Gi → 12Gi`."""
    if remedy.setting in _RESTARTED:
        return f"restarting {_RESTARTED[remedy.setting]}, the memory plan is unchanged"
    return f"{remedy.setting} {remedy.before} → {remedy.after}"


def changed_message(change: PlanChange) -> str:
    """`expandableSegments Disabled → Enabled (generation 2, expected to free 6.00 GiB)`."""
    expected = f", {effect}" if (effect := _expected_effect(change.remedy)) else ""
    early = ", before a failure" if change.preventive else ""
    return f"{setting_message(change.remedy)} (generation {change.generation}{expected}{early})"


def raised_limit_message(before: MemoryPlan | None, after: MemoryPlan, pressure: MemoryPressure) -> str:
    """`hostMemory default → 12Gi in the running pods, before a failure: policy rank 0 is projected to …`."""
    old, new = ({} if plan is None else texts_of(plan) for plan in (before, after))
    [name] = [name for name in new if old.get(name) != new[name]]
    raised = f"{name} {old.get(name, 'default')} → {new[name]}"
    return f"{raised} in the running pods, before a failure: {pressure_message(pressure)}"


def recovering_message(change: PlanChange) -> str:
    """`Fragmentation: …; expandableSegments Disabled → Enabled (generation 2, …)`."""
    return f"{_cause(change.diagnosis).rstrip('. ')}; {changed_message(change)}"


def recovered_message(change: PlanChange) -> str:
    """`resumed at step 41 after 38 s; freed 5.70 GiB`."""
    observed = change.remedy.observed_bytes
    freed = f"; freed {human_bytes(observed)}" if observed is not None and observed > 0 else ""
    return f"resumed at step {change.step} after {change.seconds_to_recover or 0.0:.0f} s{freed}"


# --- restarts and giving up ---


def with_count(message: str, kind: str, count: int, most: int) -> str:
    """`… (restart 1 of 3)`."""
    return f"{message} ({kind} {count} of {most})"


def restarts_exhausted_message(attempt: int, failure: str, earlier: Sequence[str], max_restarts: int) -> str:
    message = f"attempt {attempt} failed: {failure}"
    if max_restarts == 0:
        return f"{message} (recovery.maxRestarts is 0)"
    before = f"; earlier attempts: {', '.join(earlier)}" if earlier else ""
    return f"{message} (all restarts are used, recovery.maxRestarts is {max_restarts}{before})"


def repeated_failure_message(failure: str) -> str:
    return f"{failure.rstrip('. ')}; the previous attempt failed with the same error, and no step was committed since"


def explanation(why: str, cause: DiagnosisStatus, changes: Sequence[PlanChange], advice: Iterable[str]) -> str:
    """The cause, the reason to give up, every change with its effect, and the advice."""
    lines = list(dict.fromkeys(line for line in advice if line))
    to_continue = " ".join(map(_with_stop, lines))
    return f"{_with_stop(_cause(cause))} {_with_stop(why)} {_tried(changes)} To continue: {to_continue}"


MORE_POLICY_GPUS = "Use more GPUs for the policy (policy.gpusPerReplica)"


def smaller_job_message(savings: Sequence[tuple[str, int]]) -> str:
    """`Another job would need less of each GPU: 2.22 GiB less with policy.optimizer.moments: bfloat16, …`.

    `savings`: setting of the manifest and bytes.
    """
    each = [f"{human_bytes(saved)} less with {setting}" for setting, saved in savings]
    return f"Another job would need less of each GPU: {' or '.join(each)} (calculated)"


def _tried(changes: Sequence[PlanChange]) -> str:
    if not changes:
        return "No change of the memory plan was tried."
    return f"Tried: {'; '.join(_line(change) for change in changes)}."


def _line(change: PlanChange) -> str:
    remedy = change.remedy
    place = f"step {change.step}" + (f", {change.phase}" if change.phase else ", startup")
    expected = remedy.expected_bytes
    return (
        f"generation {change.generation} ({place}, {change.diagnosis.class_name}): {setting_message(remedy)}, "
        f"{'effect not estimated' if expected is None else f'expected {human_bytes(expected)}'}, {_observed(change)}"
    )


def _observed(change: PlanChange) -> str:
    observed = change.remedy.observed_bytes
    if observed is None:
        return "failed again" if change.seconds_to_recover is None else "effect not measured"
    return f"observed {human_bytes(observed)}" if observed >= 0 else f"observed {human_bytes(-observed)} more in use"


def _expected_effect(remedy: RemedyStatus) -> str:
    """Only a change that frees memory has an effect to name: of one that provides more, the new value is the effect."""
    before, after = _size_bytes(remedy, remedy.before), _size_bytes(remedy, remedy.after)
    grows = before is not None and after is not None and after > before
    if not remedy.expected_bytes or grows or remedy.before == "default":
        return ""
    return f"expected to free {human_bytes(remedy.expected_bytes)}"


def _size_bytes(remedy: RemedyStatus, value: str) -> int | None:
    with suppress(ValueError):
        return quantity_bytes(value) if is_size(remedy.setting) else None
    return None


def _cause(diagnosis: DiagnosisStatus) -> str:
    return f"{diagnosis.class_name}: {diagnosis.message}"


def _with_stop(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
