"""The activity of a program when it failed, from the names in its stack.

The innermost telling line counts, by families of function names. A function that serves several purposes, such as one
that gathers full parameters, takes the purpose of the nearest caller that has one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from rljob_api.memory_failure import Activity
from rljob_memory.evidence.signatures import load_table, pattern


@dataclass(frozen=True, slots=True)
class _Names:
    """One entry of `activities.yaml`, whose head has the meaning of each field."""

    activity: Activity
    in_stack: re.Pattern[str] | None
    in_prose: re.Pattern[str] | None
    is_common: bool


@cache
def _table() -> tuple[_Names, ...]:
    return tuple(_names(entry) for entry in load_table("activities.yaml"))


def _names(entry: Mapping[str, Any]) -> _Names:
    functions = "|".join(entry.get("functions", ()))
    frames = [*entry.get("lines", ()), *([rf" in _{{0,2}}(?:{functions})$"] if functions else [])]
    prose = "|".join(entry.get("words", ()))
    return _Names(
        Activity(entry["activity"]),
        re.compile("|".join(frames)) if frames else None,
        re.compile(prose, re.IGNORECASE) if prose else None,
        entry.get("is_common", False),
    )


_MOST_CHARACTERS = 1_000
"""Maximum length of the text before a shortage."""
_OF_THE_START = frozenset({Activity.ENGINE_PROFILING, Activity.ENGINE_WARM_UP, Activity.GRAPH_CAPTURE})
_SERVES: dict[Activity, frozenset[Activity]] = {
    Activity.GATHERING: frozenset(
        {Activity.WEIGHT_SYNC, Activity.CHECKPOINT, Activity.OPTIMIZER, Activity.FORWARD, Activity.BACKWARD}
    ),
    Activity.MODEL_LOAD: frozenset({Activity.WEIGHT_SYNC, Activity.CHECKPOINT, Activity.WAKE, Activity.OPTIMIZER}),
    Activity.LOGITS: _OF_THE_START,
    Activity.SAMPLING: _OF_THE_START,
    Activity.ENGINE_STEP: _OF_THE_START,
    Activity.ENGINE_WARM_UP: frozenset({Activity.ENGINE_PROFILING}),
}
"""Activities on behalf of others: the nearest caller among these is the purpose."""


def activity_of(stack: Sequence[str]) -> Activity | None:
    """The activity of a stack, given as lines with the outermost frame first; None if no line names one.

    The innermost line counts: Lightning runs the whole training step inside `optimizer.step(closure)`. A plain
    `forward` counts only if nothing else does, since most stacks contain it.
    """
    found: Activity | None = None
    for line in reversed(stack):
        activity = _activity_of_line(line)
        if activity is None:
            continue
        if found is None or activity in _SERVES[found]:
            found = activity
            if found not in _SERVES:
                return found
    if found is not None:
        return found
    common = next(each for each in _table() if each.is_common)
    return common.activity if common.in_stack and any(common.in_stack.search(line) for line in stack) else None


def activity_of_text(text: str) -> Activity | None:
    """The activity that a message names before the shortage, or a title after it: `Capture cuda graph failed: CUDA out
    of memory`, `OOM when saving checkpoints`."""
    before = text.partition("out of memory")[0][-_MOST_CHARACTERS:]
    after = pattern("circumstance").search(text)
    named = f"{before} {after[1]}" if after else before
    return activity_of_report(named) or _activity_of_line(named)


def activity_of_report(text: str) -> Activity | None:
    """The activity in a report that something could not be made, which follows an error without a stack."""
    return next((each.activity for each in _table() if each.in_prose and each.in_prose.search(text)), None)


def _activity_of_line(line: str) -> Activity | None:
    for each in _table():
        if each.in_stack and not each.is_common and each.in_stack.search(line):
            return each.activity
    return None


# Frames of a stack in a log, in the forms of Python, IPython, Colab and rich, and lines of code without a frame.

LOADING = "log in load_model"
"""The frame in whose place a line of that progress stands."""


@lru_cache(1024)
def frames_of(text: str) -> tuple[str, ...]:
    """`file in function` of each frame in the line, with the slashes of Unix."""
    if " in " not in text:
        return ()
    frames = (f"{match['file']} in {match['name'].rpartition('.')[2]}" for match in pattern("frame").finditer(text))
    return tuple(frame.replace("\\", "/") for frame in frames)


def call_of(text: str) -> str | None:
    """The function that the line reports as running, in the form of a frame; None if it names none."""
    if "oad" in text and pattern("loading").search(text):
        return LOADING
    if "ray::" not in text and "ing " not in text:
        return None
    match = pattern("call").search(text)
    return f"log in {match['name'] or match['name2'] or match['name3']}" if match else None


def code_of(lines: Sequence[str]) -> list[str]:
    """The lines that can be code or the name of a function, as posts have them without a frame."""
    plain = [pattern("line_number").sub("", line).strip() for line in lines]
    return [line for line in plain if pattern("code_line").search(line) and not pattern("logged").search(line)]
