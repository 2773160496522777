"""The failure that an exception reports, from its type, its message and its stack."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import TracebackType

from rljob_memory.evidence.activity import activity_of
from rljob_memory.evidence.allocator_message import START, parse_allocator_message, parse_request
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.first_failure import first_failure
from rljob_memory.evidence.signatures import CORRUPT_SIZE, match_signature

_MOST_STACK_LINES = 120
_LONGEST_TEXT = 1_000
_LONGEST_CODE = 200


def failure_of_exception(error: BaseException) -> Failure | None:
    """The first failure of memory among `error` and the exceptions that led to it; None if there is none.

    The caller adds role, rank and step.
    """
    failures = [failure for each in _chain(error) if (failure := _failure(each)) is not None]
    return first_failure(failures)


def _chain(error: BaseException) -> list[BaseException]:
    """The exception after those that led to it, as a traceback prints them."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain[::-1]


def _failure(error: BaseException) -> Failure | None:
    message = "".join(traceback.format_exception_only(error)).strip()
    found = _found(message)
    if found is None:
        return None
    kind, text, sizes = found
    device = None
    if kind is FailureKind.ALLOCATOR:
        device = parse_allocator_message(message) or parse_request(message)
    return Failure(
        kind,
        text=text.strip()[:_LONGEST_TEXT],
        device=device,
        sizes=sizes,
        activity=activity_of(list(_stack_lines(error.__traceback__))[-_MOST_STACK_LINES:]),
    )


def _found(message: str) -> tuple[FailureKind, str, dict[str, int]] | None:
    """The kind, the line of the message that names it, and the sizes in it."""
    for line in message.splitlines():
        if CORRUPT_SIZE in line:
            continue
        if START.search(line):
            return FailureKind.ALLOCATOR, line, {}
        if found := match_signature(line):
            return found[0], line, found[1]
    return None


def _stack_lines(stack: TracebackType | None) -> Iterator[str]:
    """`file in function` and the line of code of each frame, the outermost first."""
    for frame in traceback.extract_tb(stack):
        yield f"{frame.filename} in {frame.name}"
        if frame.line:
            yield frame.line.strip()[:_LONGEST_CODE]
