"""Settings of torch's CUDA allocator in a template: kept, moved into the effective variable, and reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rljob_api.roles import PodTemplate
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
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.pod_layout import WorkerGroup
from rljob_operator.objects.pod_template import with_container_names
from rljob_operator.objects.pods import CONTAINER

_LONGEST_MESSAGE = 1024
_MAX_DOUBTS = 10
"""Events about one role."""


@dataclass(frozen=True, slots=True)
class RoleAllocator:
    """Allocator of one role."""

    environment: dict[str, str]
    """Variables of the role's processes."""

    template: PodTemplate
    """The role's template, with the effective variable in place of the ignored one."""

    notices: tuple[EventNote, ...] = ()


def role_allocator(attempt: JobAttempt, group: WorkerGroup) -> RoleAllocator:
    """The allocator of the group's role: RLJob's settings, unless the template sets a value."""
    template, folded = _fold(group)
    default = _default_environment(attempt, group)
    entry = next((e for e in _entries(template) if _is_about(e, ALLOCATOR_VARIABLE)), None)
    if entry is None:
        return RoleAllocator(default, template)
    environment = {ALLOCATOR_VARIABLE: entry["value"]} if isinstance(entry.get("value"), str) else {}
    settings = environment.get(ALLOCATOR_VARIABLE, "")
    shown = f" to {settings[:_LONGEST_MESSAGE]!r}" if settings else ""
    kept = f"{group.path} sets {ALLOCATOR_VARIABLE}{shown}, and is respected"
    problems = _problems(attempt, group, settings)[:_MAX_DOUBTS]
    doubts = [_note("Warning", "AllocatorSettingDoubtful", f"{kept}: {problem}") for problem in problems]
    notices = [_note("Normal", "AllocatorSettingFolded", folded)] if folded else []
    notices += doubts or [_note("Normal", "AllocatorSettingKept", kept)]
    return RoleAllocator(environment, template, tuple(notices))


def _default_environment(attempt: JobAttempt, group: WorkerGroup) -> dict[str, str]:
    if attempt.own_trainer:
        return allocator_environment(group.role, attempt.settings.trainer_torch_version)
    pinned = attempt.spec.memory.expandable_segments
    planned = attempt.plan is not None and attempt.plan.expandable_segments
    return other_trainer_environment("Enabled" if pinned == "Auto" and planned else pinned)


def _problems(attempt: JobAttempt, group: WorkerGroup, settings: str) -> list[str]:
    """Errors in the user's `settings`, and contradictions to the rest of the job."""
    version = attempt.torch_version
    problems = setting_problems(settings, torch_release(version) if version else None)
    expandable = allocator_options(settings).get("expandable_segments")
    pinned = attempt.spec.memory.expandable_segments
    if expandable == "True" and group.role == "rollout":
        problems.append("vLLM's custom all-reduce with CUDA graphs crashes with expandable segments; remove it")
    elif expandable and pinned != "Auto" and expandable != str(pinned == "Enabled"):
        problems.append(f"contradicts spec.memory.expandableSegments: {pinned}; remove one of the two")
    return problems


def _fold(group: WorkerGroup) -> tuple[PodTemplate, str]:
    """The template with PYTORCH_ALLOC_CONF renamed, or removed if both are set, and a message about it."""
    entries = _entries(group.template)
    if not any(_sets(entry, IGNORED_ALLOCATOR_VARIABLE) for entry in entries):
        return group.template, ""
    if any(_is_about(entry, ALLOCATOR_VARIABLE) for entry in entries):
        folded = [entry for entry in entries if not _sets(entry, IGNORED_ALLOCATOR_VARIABLE)]
        done = "removed, because torch ignores it if both are set"
        advice = f"set only {ALLOCATOR_VARIABLE}"
    else:
        folded = [
            {**entry, "name": ALLOCATOR_VARIABLE} if _sets(entry, IGNORED_ALLOCATOR_VARIABLE) else entry
            for entry in entries
        ]
        done, advice = f"renamed to {ALLOCATOR_VARIABLE}", "use that name"
    message = f"{IGNORED_ALLOCATOR_VARIABLE} in {group.path} is {done}; {advice}"
    return _with_entries(group.template, folded), message


def _sets(entry: Any, variable: str) -> bool:
    return _is_about(entry, variable) and entry.get("$patch") != "delete"


def _is_about(element: Any, name: str) -> bool:
    return isinstance(element, dict) and element.get("name") == name


def _entries(template: PodTemplate) -> list[Any]:
    """Environment of the container `rljob` in a template; empty if malformed, which the merge reports."""
    containers = with_container_names(template.spec).get("containers")
    for container in containers if isinstance(containers, list) else []:
        if _is_about(container, CONTAINER):
            entries = container.get("env")
            return entries if isinstance(entries, list) else []
    return []


def _with_entries(template: PodTemplate, entries: list[Any]) -> PodTemplate:
    spec = with_container_names(template.spec)
    containers = [
        {**container, "env": entries} if _is_about(container, CONTAINER) else container
        for container in spec["containers"]
    ]
    return PodTemplate(metadata=template.metadata, spec={**spec, "containers": containers})


def _note(type_: Literal["Normal", "Warning"], reason: str, message: str) -> EventNote:
    return EventNote(type_, reason, message[:_LONGEST_MESSAGE])
