"""torch's CUDA allocator in worker pods: RLJob's settings, unless the user's template has its own."""

from __future__ import annotations

from typing import Any, Literal

from rljob_api.topology import WorkerPods
from rljob_memory.allocator import (
    ALLOCATOR_VARIABLE,
    IGNORED_ALLOCATOR_VARIABLE,
    allocator_environment,
    allocator_options,
    other_trainer_environment,
    setting_problems,
    torch_release,
)
from rljob_operator.events import EventNote
from rljob_operator.objects.attempt import JobAttempt, template_path
from rljob_operator.objects.pod_template import Pod, own_container

_MAX_MESSAGE_CHARACTERS = 1024
_MAX_PROBLEMS = 10
"""Events about one role."""


def default_allocator(attempt: JobAttempt, group: WorkerPods) -> dict[str, str]:
    """Return the variables of the allocator in the group's pods before the template."""
    if attempt.own_trainer:
        return allocator_environment(group.role, attempt.settings.trainer_torch_version)
    pinned = attempt.spec.memory.expandable_segments
    planned = attempt.plan is not None and attempt.plan.expandable_segments
    return other_trainer_environment("Enabled" if pinned == "Auto" and planned else pinned)


def allocator_of(pod: Pod) -> dict[str, str]:
    """Return the variables of the allocator in a pod, as far as they have literal values."""
    entry = _entry(pod, ALLOCATOR_VARIABLE)
    return {ALLOCATOR_VARIABLE: entry["value"]} if entry and isinstance(entry.get("value"), str) else {}


def settle_allocator(attempt: JobAttempt, group: WorkerPods, before: Pod, merged: Pod) -> list[EventNote]:
    """Move the user's allocator settings in a `merged` pod into the variable that torch reads, and return Events about
    them. `before`: the pod without the template."""
    default, given = _entry(before, ALLOCATOR_VARIABLE), _entry(merged, ALLOCATOR_VARIABLE)
    notes = []
    path = template_path(group.role)
    if (ignored := _entry(merged, IGNORED_ALLOCATOR_VARIABLE)) is not None:
        own = given is default  # the merge has not touched it
        _replace_entries(merged, {**ignored, "name": ALLOCATOR_VARIABLE} if own else given)
        renamed = f"renamed to {ALLOCATOR_VARIABLE}; use that name"
        removed = f"removed, because torch ignores it if both are set; set only {ALLOCATOR_VARIABLE}"
        message = f"{IGNORED_ALLOCATOR_VARIABLE} in {path} is {renamed if own else removed}"
        notes.append(_note("Normal", "AllocatorSettingFolded", message))
        given = _entry(merged, ALLOCATOR_VARIABLE)
    if given is default:
        return notes
    settings = allocator_of(merged).get(ALLOCATOR_VARIABLE, "")
    value = f" to {settings[:_MAX_MESSAGE_CHARACTERS]!r}" if settings else ""
    kept = f"{path} sets {ALLOCATOR_VARIABLE}{value}, and is respected"
    problems = _problems(attempt, group, settings)[:_MAX_PROBLEMS]
    doubts = [_note("Warning", "AllocatorSettingDoubtful", f"{kept}: {problem}") for problem in problems]
    return notes + (doubts or [_note("Normal", "AllocatorSettingKept", kept)])


def _entry(pod: Pod, variable: str) -> dict[str, Any] | None:
    return next((entry for entry in own_container(pod)["env"] if entry["name"] == variable), None)


def _replace_entries(pod: Pod, entry: dict[str, Any] | None) -> None:
    container = own_container(pod)
    names = (ALLOCATOR_VARIABLE, IGNORED_ALLOCATOR_VARIABLE)
    others = [other for other in container["env"] if other["name"] not in names]
    container["env"] = others if entry is None else [*others, entry]


def _problems(attempt: JobAttempt, group: WorkerPods, settings: str) -> list[str]:
    """Return the errors in the user's `settings`, and contradictions to the rest of the job."""
    version = attempt.torch_version
    problems = setting_problems(settings, torch_release(version) if version else None)
    expandable = allocator_options(settings).get("expandable_segments")
    pinned = attempt.spec.memory.expandable_segments
    if expandable == "True" and group.role == "rollout":
        problems.append("vLLM's custom all-reduce with CUDA graphs crashes with expandable segments; remove the option")
    elif expandable and pinned != "Auto" and expandable != str(pinned == "Enabled"):
        problems.append(f"contradicts spec.memory.expandableSegments: {pinned}; remove one of the two")
    return problems


def _note(type_: Literal["Normal", "Warning"], reason: str, message: str) -> EventNote:
    return EventNote(type_, reason, message[:_MAX_MESSAGE_CHARACTERS])
