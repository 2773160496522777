"""A failure in another dress (prefixes, JSON, HTML, broken or joined lines, cut messages) is still found.

A log that reports a shortage never gets an empty answer, and no dress makes a wrong class certain.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from html import escape
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.memory.diagnosis.recorded import diagnoses_of, public_failures, recorded_texts

_SURE = 0.8


def cases() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Texts with their accepted classes: some of the recorded failures, and of those in public threads."""
    found = {path.name: (path.read_text(), (path.parent.name,)) for path in recorded_texts()[::3]}
    return found | {case.name: (case.text, case.accepted) for case in public_failures()[::4]}


CASES = cases()
FOUND = {name: diagnoses_of(text) for name, (text, _) in CASES.items()}


def each_line(change: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: "\n".join(change(line) for line in text.splitlines())


def prefixed(prefix: str) -> Callable[[str], str]:
    return each_line(lambda line: prefix + line)


def in_json(line: str) -> str:
    return json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-03-04T10:11:12.123456789Z"})


DRESSES: dict[str, Callable[[str], str]] = {
    "Ray's name and pid": prefixed("\x1b[36m(TaskRunner pid=55, ip=10.0.0.1)\x1b[0m "),
    "torchrun's rank": prefixed("[rank3]: "),
    "a time": prefixed("2026-03-04 10:11:12,345 - ERROR - "),
    "containerd's stream": prefixed("2026-03-04T10:11:12.123456789Z stderr F "),
    "the system's log": prefixed("Mar  4 10:11:12 node-7 train[4123]: "),
    "kubectl's pod": prefixed("[pod/trainer-0/main] "),
    "Compose's service": prefixed("trainer-1  | "),
    "a quotation": prefixed("> "),
    "Python's logger": prefixed("ERROR:root:"),
    "loguru's head": prefixed("2026-03-04 10:11:12.345 | ERROR    | __main__:run:52 - "),
    "colors": each_line(lambda line: f"\x1b[31m{line}\x1b[0m"),
    "Docker's JSON": each_line(in_json),
    "JSON of one line": lambda text: json.dumps({"level": "error", "exc_info": text}),
    "HTML": lambda text: "\n".join(f'<span class="line">{escape(line)}</span><br>' for line in text.splitlines()),
    "Markdown": each_line(lambda line: f"`{line}`"),
    "line ends of Windows": lambda text: text.replace("\n", "\r\n"),
    "paths of Windows": lambda text: re.sub(r'"/[^"]*"', lambda path: path[0].replace("/", "\\"), text),
}
"""Changes that keep every word in place."""


@pytest.mark.parametrize("dress", DRESSES)
def test_a_dress_changes_no_first_diagnosis(dress: str) -> None:
    changed = {}
    for name, (text, _) in CASES.items():
        before, after = FOUND[name][:1], diagnoses_of(DRESSES[dress](text))[:1]
        if [each.failure_class for each in before] != [each.failure_class for each in after]:
            changed[name] = [str(each.failure_class) for each in before + after]
    assert len(changed) <= _MOST_CHANGED * len(CASES), changed
    assert not [name for name, classes in changed.items() if FOUND[name] and len(classes) == 1], changed


_MOST_CHANGED = 0.02
"""Tables lose their form behind a prefix, as those of nvidia-smi and of df."""


def wrapped(text: str, width: int) -> str:
    lines = [textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()]
    return "\n".join("\n".join(pieces) for pieces in lines)


def has_message(name: str) -> bool:
    """True if the case has an accepted class, and words of torch's allocator."""
    text, accepted = CASES[name]
    return bool(accepted) and "Tried to allocate" in text


MESSAGES = sorted(filter(has_message, CASES))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MESSAGES), st.integers(50, 160))
def test_a_broken_message_is_found_and_not_mistaken(name: str, width: int) -> None:
    text, accepted = CASES[name]
    found = diagnoses_of(wrapped(text, width))
    assert found
    assert {str(each.failure_class) for each in found if each.confidence > _SURE} <= set(accepted)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_that_is_cut_is_never_silent(name: str, data: Any) -> None:
    """The cut leaves at least one of the phrases that only torch's message has."""
    text, accepted = CASES[name]
    message = text.index("Tried to allocate")
    begin = data.draw(st.integers(0, message))
    end = data.draw(st.integers(min(message + 45, len(text)), len(text)))
    found = diagnoses_of(text[begin:end])
    assert found
    assert {str(each.failure_class) for each in found if each.confidence > _SURE} <= set(accepted)


MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.84 GiB. GPU 1 has a total capacity of 79.10 GiB "
    "of which 1.33 GiB is free. Process 7002 has 13.01 GiB memory in use. Including non-PyTorch memory, this process "
    "has 64.55 GiB memory in use. Of the allocated memory 60.20 GiB is allocated by PyTorch, with 258.09 MiB allocated "
    "in private pools (e.g., CUDA Graphs), and 2.57 GiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


@pytest.mark.parametrize("begin", range(0, len(MESSAGE) - 60, 7))
def test_any_remainder_of_a_message_is_a_failure(begin: int) -> None:
    found = diagnoses_of(f"some line\n{MESSAGE[begin:]}\nanother line")
    assert found, MESSAGE[begin:]
    assert all(each.confidence <= _SURE for each in found)


@pytest.mark.parametrize("end", range(40, len(MESSAGE), 7))
def test_any_beginning_of_a_message_is_a_failure(end: int) -> None:
    found = diagnoses_of(f"some line\n{MESSAGE[:end]}")
    assert found, MESSAGE[:end]
    assert all(each.confidence <= _SURE for each in found)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_broken_message_keeps_its_numbers(width: int) -> None:
    broken = "\n".join(MESSAGE[start : start + width] for start in range(0, len(MESSAGE), width))
    whole, pieces = diagnoses_of(MESSAGE)[0], diagnoses_of(broken)[0]
    assert (pieces.failure_class, pieces.numbers) == (whole.failure_class, whole.numbers)


@pytest.mark.parametrize("end", range(1, 40))
def test_words_of_a_signature_may_stand_in_two_lines(end: int) -> None:
    line = "RuntimeError: DataLoader worker (pid 47) is killed by signal: Bus error. It is possible that"
    at = 30 + end
    assert diagnoses_of(f"{line[:at]}\n{line[at:].lstrip()}")
