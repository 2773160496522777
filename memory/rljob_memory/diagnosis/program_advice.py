"""Advice in the terms of the program that ran out of memory: its option, the present value, the value to try.

An option is named only if it changes the memory that the class is about, with the program's backend. Without one, the
general advice for the class is the better advice.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files

from pydantic import TypeAdapter

from rljob_api.memory_failure import Activity, FailureKind
from rljob_memory.diagnosis.balance import Balance
from rljob_memory.diagnosis.classes import Diagnosis, FailureClass
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.programs import PROGRAMS, Effect, Option, Program
from rljob_memory.sizes import human_bytes

_TOO_SMALL = ("needed_bytes", "available_bytes")
_STEP_OF_SHARE = 0.05
_LEAST_SHARE = 0.05
_MOST_OPTIONS = 2
_RELATIVE_CHANGES = (None, "lower", "halve")
"""Changes that depend on the present value."""


def with_program_advice(diagnosis: Diagnosis, balance: Balance) -> Diagnosis:
    """The diagnosis with the options of the program that the log shows; unchanged if it shows none that helps."""
    if diagnosis.is_of_rljob and not balance.evidence.shows_a_trainer:
        return diagnosis
    row = next((row for row in _ROWS if row.fits(diagnosis.failure_class, balance)), None)
    sentences = list(_special(diagnosis, row, balance)) or list(_sentences(diagnosis, row, balance))
    if sentences and row and row.after_the_general:
        sentences.insert(0, diagnosis.failure_class.general_advice)
    return replace(diagnosis, program_advice=" ".join(sentences)) if sentences else diagnosis


@dataclass(frozen=True)
class _Row:
    """An entry of `advice.toml`, whose head has the meaning of each field."""

    cause: FailureClass
    effects: tuple[Effect, ...] = ()
    text: str = ""
    activities: frozenset[Activity] = frozenset()
    kinds: frozenset[FailureKind] = frozenset()
    in_engine: bool = False
    of_a_server: bool = False
    after_the_general: bool = False

    def fits(self, cause: FailureClass, balance: Balance) -> bool:
        failure = balance.failure
        if cause is not self.cause or (self.in_engine and not failure.in_engine):
            return False
        if self.of_a_server and balance.evidence.shows_a_trainer:
            return False
        return not (self.activities or self.kinds) or failure.activity in self.activities or failure.kind in self.kinds


_TABLE = tomllib.loads(files(__package__).joinpath("advice.toml").read_text(encoding="utf-8"))
_ROWS = TypeAdapter(tuple[_Row, ...]).validate_python(_TABLE["rows"])


def _special(diagnosis: Diagnosis, row: _Row | None, balance: Balance) -> Iterator[str]:
    """Advice that no option of a trainer gives."""
    owners = balance.evidence.host_owners
    if row and row.text:
        yield row.text
    elif diagnosis.failure_class is FailureClass.HOST_MEMORY and owners:
        owner, held = owners.most_common(1)[0]
        found = _option(Effect.SLEEP, balance.evidence) if owner.endswith(".sleep") else None
        less = f": leave out {_spelled(found[1], balance.evidence)}, or use fewer engines" if found else ""
        yield f"The largest users of host memory are {owner} with {human_bytes(held)}{less}."
        yield diagnosis.failure_class.general_advice


def _sentences(diagnosis: Diagnosis, row: _Row | None, balance: Balance) -> Iterator[str]:
    evidence = balance.evidence
    effects = row.effects if row else ()
    if not evidence.shows_a_trainer:  # a server never puts its engine to sleep for an update
        effects = tuple(effect for effect in effects if effect is not Effect.SLEEP)
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


def _option(effect: Effect, evidence: CollectedEvidence) -> tuple[Program, Option] | None:
    """The option of the trainer that the log shows; else of the engine."""
    shown = [program for key, program in PROGRAMS.items() if key in evidence.programs]
    values, names = evidence.option_values, evidence.options
    for program in sorted(shown, key=lambda program: program.engine):
        version = evidence.versions.get(program.key)
        if option := program.option(effect, version, values, names, evidence.backend):
            return program, option
    return None


def _of_any_version(program: Program, option: Option, evidence: CollectedEvidence) -> Option:
    """The option as the log spells it, also with what it was in older versions if the log shows neither the version nor
    the name."""
    if program.key in evidence.versions or option.leaf in evidence.options:
        return replace(option, name=_spelled(option, evidence))
    older = program.older(option)
    if option.before is not None:
        note = f"before {option.before}"
        return replace(option, note=f"{note}; {option.note}" if option.note else note)
    if older is None:
        return option
    if older.name != option.name:
        note = f"{older.name} before {option.since}"
        return replace(option, note=f"{note}; {option.note}" if option.note else note)
    if option.change in _RELATIVE_CHANGES:
        return replace(option, default=f"{option.default}, or {older.default} before {option.since}")
    return option


def _spelled(option: Option, evidence: CollectedEvidence) -> str:
    """The whole name that the log has for the option, of another version or in a shorter form; else the option's."""
    spelled = evidence.option_spellings.get(option.leaf, "")
    of_same_section = spelled.partition(".")[0] == option.full_name.partition(".")[0]
    return spelled if of_same_section and option.full_name not in evidence.option_values else option.name


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
        at_its_least = value is None and option.default == "1"
        return f"lower {option.name}{_present(option, value)}" if not at_its_least or option.note else None
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
