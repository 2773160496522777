"""The failure that an exception reports, from its type, its message and its stack."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import TracebackType

from rljob_memory.evidence.activity import activity_of
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.first_failure import first_failure
from rljob_memory.evidence.signatures import match_signature
from rljob_memory.evidence.torch_message import START, parse_message

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
    activity = activity_of(list(_stack_lines(error.__traceback__))[-_MOST_STACK_LINES:])
    for line in message.splitlines():
        match, text = match_signature(line), line.strip()[:_LONGEST_TEXT]
        if (match is None or match.kind is not None) and START.search(line):
            return Failure(FailureKind.ALLOCATOR, text=text, device=parse_message([message]), activity=activity)
        if match is not None and match.kind is not None:
            return Failure(match.kind, text=text, sizes=match.sizes, activity=activity)
    return None


def _stack_lines(stack: TracebackType | None) -> Iterator[str]:
    """`file in function` and the line of code of each frame, the outermost first."""
    for frame in traceback.extract_tb(stack):
        yield f"{frame.filename} in {frame.name}"
        if frame.line:
            yield frame.line.strip()[:_LONGEST_CODE]
