"""The account of an out-of-memory failure whose process has only the exception: its type, its message and its stack."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import TracebackType

from rljob_api.memory_failure import MAX_FAILURE_TEXT_LENGTH, FailureKind, MemoryFailure
from rljob_memory.evidence.activity import activity_of
from rljob_memory.evidence.signatures import match_signature, pattern
from rljob_memory.evidence.torch_message import parse_message

_MOST_STACK_LINES = 120
_LONGEST_CODE = 200


def account_of(error: BaseException) -> MemoryFailure | None:
    """The first failure of memory among `error` and the exceptions that led to it; None if there is none.

    The caller adds role, rank and step.
    """
    return next((account for each in _chain(error) if (account := _account(each)) is not None), None)


def _chain(error: BaseException) -> list[BaseException]:
    """The exception after those that led to it, as a traceback prints them."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain[::-1]


def _account(error: BaseException) -> MemoryFailure | None:
    message = "".join(traceback.format_exception_only(error)).strip()
    activity = activity_of(list(_stack_lines(error.__traceback__))[-_MOST_STACK_LINES:])
    for line in message.splitlines():
        match, text = match_signature(line), line.strip()[:MAX_FAILURE_TEXT_LENGTH]
        if (match is None or match.kind is not None) and pattern("message_start").search(line):
            device = parse_message([message])  # of a process without an observer, such as an engine's own workers
            return MemoryFailure(kind=FailureKind.ALLOCATOR, text=text, device=device, activity=activity)
        if match is not None and match.kind is not None:
            return MemoryFailure(kind=match.kind, text=text, sizes=dict(match.sizes), activity=activity)
    return None


def _stack_lines(stack: TracebackType | None) -> Iterator[str]:
    """`file in function` and the line of code of each frame, the outermost first."""
    for frame in traceback.extract_tb(stack):
        yield f"{frame.filename} in {frame.name}"
        if frame.line:
            yield frame.line.strip()[:_LONGEST_CODE]
