"""Advice in the terms of the program that ran out of memory: its option, the present value, the value to try."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from rljob_api.memory_failure import Activity
from rljob_memory.diagnosis.balance import Balance
from rljob_memory.diagnosis.classes import Diagnosis, FailureClass
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.programs import PROGRAMS, Effect, Option, Program
from rljob_memory.sizes import human_bytes

_EFFECTS: dict[FailureClass, tuple[Effect, ...]] = {
    FailureClass.ACTIVATION_SPIKE: (Effect.UPDATE, Effect.ACTIVATIONS, Effect.SLEEP),
    FailureClass.KV_CACHE_OVERSIZED: (Effect.SHARE, Effect.LENGTH, Effect.SEQUENCES),
    FailureClass.WEIGHT_SYNC_SPIKE: (Effect.SYNC, Effect.SHARE),
    FailureClass.OPTIMIZER_STATE: (Effect.OPTIMIZER, Effect.WEIGHTS, Effect.PARAMETERS, Effect.REFERENCE),
    FailureClass.MODEL_WEIGHTS: (Effect.PARAMETERS, Effect.WEIGHTS, Effect.REFERENCE),
    FailureClass.ENGINE_NOT_ASLEEP: (Effect.SLEEP, Effect.SHARE),
    FailureClass.FRAGMENTATION: (Effect.ALLOCATOR,),
    FailureClass.ALLOCATOR_CACHE: (Effect.ALLOCATOR, Effect.SHARE),
    FailureClass.HOST_MEMORY: (Effect.LOADER,),
    FailureClass.SHARED_MEMORY: (Effect.LOADER,),
    FailureClass.UNKNOWN: (Effect.UPDATE, Effect.SHARE),
}
_OF_SAMPLING = (Effect.SEQUENCES, Effect.SHARE)
_OF_AN_ENGINES_WEIGHTS = (Effect.ENGINE_PARALLEL,)
_OF_LOGITS = (Effect.LOGITS, Effect.LOGPROBS, Effect.UPDATE)
_TOO_SMALL = ("needed_bytes", "available_bytes")
_STEP_OF_SHARE = 0.05
_LEAST_SHARE = 0.05
_MOST_OPTIONS = 2
_OF_PRESENT_VALUES = (None, "lower", "halve")
"""Changes that depend on the present value."""


def with_program_advice(diagnosis: Diagnosis, balance: Balance) -> Diagnosis:
    """The diagnosis with the options of the program that the log shows; unchanged if it shows none that helps."""
    sentences = list(_sentences(diagnosis, balance))
    return replace(diagnosis, program_advice=" ".join(sentences)) if sentences else diagnosis


def _sentences(diagnosis: Diagnosis, balance: Balance) -> Iterator[str]:
    evidence = balance.evidence
    effects = _effects(diagnosis, balance.failure)
    options = [found for effect in effects if (found := _option(effect, evidence))]
    changes = [
        (program, change)
        for program, option in options
        if (change := _change(_of_any_version(program, option, evidence), diagnosis, balance)) is not None
    ][:_MOST_OPTIONS]
    for program in dict.fromkeys(program for program, _ in changes):
        version = evidence.versions.get(program.key)
        title = f"{program.title} {version}" if version else program.title
        yield f"{title}: {'; or '.join(change for owner, change in changes if owner is program)}."


def _effects(diagnosis: Diagnosis, failure: Failure) -> tuple[Effect, ...]:
    """The uses of memory to change, the most useful first; without duplicates."""
    effects = _EFFECTS.get(diagnosis.failure_class, ())
    match diagnosis.failure_class, failure.activity:
        case FailureClass.ACTIVATION_SPIKE, Activity.LOGITS:
            effects = (*_OF_LOGITS, *effects)
        case FailureClass.KV_CACHE_OVERSIZED, Activity.SAMPLING | Activity.LOGITS | Activity.GRAPH_CAPTURE:
            effects = (*_OF_SAMPLING, *effects)
        case FailureClass.MODEL_WEIGHTS, _ if failure.in_engine:
            effects = _OF_AN_ENGINES_WEIGHTS
    return tuple(dict.fromkeys(effects))


def _option(effect: Effect, evidence: CollectedEvidence) -> tuple[Program, Option] | None:
    """The option of the trainer that the log shows; else of the engine."""
    shown = [program for key, program in PROGRAMS.items() if key in evidence.programs]
    values, names = evidence.option_values, evidence.option_names
    for program in sorted(shown, key=lambda program: program.engine):
        if option := program.option(effect, evidence.versions.get(program.key), values, names):
            return program, option
    return None


def _of_any_version(program: Program, option: Option, evidence: CollectedEvidence) -> Option:
    """The option, also with what it was in older versions if the log shows neither the version nor the name."""
    older = program.older(option)
    if older is None or program.key in evidence.versions or option.leaf in evidence.option_names:
        return option
    if older.name != option.name:
        note = f"{older.name} before {option.since}"
        return replace(option, note=f"{note}; {option.note}" if option.note else note)
    if option.change in _OF_PRESENT_VALUES:
        return replace(option, default=f"{option.default}, or {older.default} before {option.since}")
    return option


def _change(option: Option, diagnosis: Diagnosis, balance: Balance) -> str | None:
    """`set NAME: 0.85 → 0.45, which frees about 56 GiB`; None if the option cannot help."""
    value = option.value(balance.evidence.option_values)
    change: str | None
    match option.change:
        case "lower":
            too_small = balance.failure.kind is FailureKind.KV_CACHE_TOO_SMALL
            change = _raised(option, value, diagnosis) if too_small else _lowered(option, value, diagnosis)
        case "halve":
            change = _halved(option, value)
        case "double":
            change = _doubled(option, value)
        case None:
            change = f"lower {option.name}{_present(option, value)}"
        case wanted if wanted.lower() in ((value or option.default or "").lower(), ""):
            return None
        case wanted:
            change = f"set {option.name}: {f'{value} → ' if value else ''}{wanted}"
    if change and option.change != "lower" and (freed := _freed_bytes(option, balance)):
        change = f"{change}, which frees about {human_bytes(freed)}"
    return f"{change}, {option.note}" if change and option.note else change


def _freed_bytes(option: Option, balance: Balance) -> int:
    """Effect of an option on the failing process's GPU, as far as the balance shows what it changes; else 0."""
    match option.effect, option.change:
        case Effect.UPDATE, "halve":
            return balance.activations_bytes // 2
        case Effect.SLEEP, _:
            return balance.engine_bytes
        case Effect.OPTIMIZER, _ if balance.is_full_of_state and balance.expected:
            return balance.expected.optimizer_bytes
        case Effect.PARAMETERS, _ if balance.is_full_of_state and balance.expected:
            return balance.expected.weights_bytes
        case _:
            return 0


def _present(option: Option, value: str | None) -> str:
    if value is not None:
        return f" (now {value})"
    return f" (default {option.default})" if option.default else ""


def _halved(option: Option, value: str | None) -> str | None:
    if value is None or not value.isdigit():
        return f"lower {option.name}{_present(option, value)}"
    number = int(value)
    return f"set {option.name}: {number} → {number // 2}" if number > 1 else None


def _doubled(option: Option, value: str | None) -> str:
    present = value if value is not None and value.isdigit() else option.default
    if present is None or not present.isdigit():
        return f"raise {option.name}"
    return f"set {option.name}: {present} → {2 * int(present)}"


def _raised(option: Option, value: str | None, diagnosis: Diagnosis) -> str:
    """The share of an engine that had too little, with what was missing if that is known."""
    numbers = diagnosis.numbers
    change = f"raise {option.name}{_present(option, value)}"
    if not all(name in numbers for name in _TOO_SMALL):
        return change
    more = human_bytes(max(numbers["needed_bytes"] - numbers["available_bytes"], 0))
    return f"{change}, by {more} of the GPU"


def _lowered(option: Option, value: str | None, diagnosis: Diagnosis) -> str:
    """The share, less the memory that was missing, in steps of 0.05."""
    numbers = diagnosis.numbers
    total, free = numbers.get("total_bytes"), numbers.get("free_bytes", 0)
    wanted = numbers.get("requested_bytes") or numbers.get("wanted_bytes")
    try:
        share = float(value) if value is not None else None
    except ValueError:
        share = None
    if share is None or not total or not wanted or not _LEAST_SHARE < share <= 1:
        return f"lower {option.name}{_present(option, value)}"
    missing = max(wanted - free, 0) / total
    steps = max(math.ceil(round(missing / _STEP_OF_SHARE, 6)), 1)
    lower = max(round(share - steps * _STEP_OF_SHARE, 2), _LEAST_SHARE)
    freed = human_bytes(round((share - lower) * total))
    return f"set {option.name}: {share:g} → {lower:g}, which frees about {freed}"
