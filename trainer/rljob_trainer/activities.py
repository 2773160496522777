"""Markers of the work of this process, for the account of an out-of-memory failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rljob_api.memory_failure import Activity

_stack: list[Activity] = []
"""Activities of the whole process, not of a thread: in a backward pass, a thread of autograd requests memory."""


@contextmanager
def activity(work: Activity) -> Iterator[None]:
    """Mark the block as `work`. Of nested blocks the innermost counts. Takes a microsecond, and waits for no GPU."""
    _stack.append(work)
    try:
        yield
    finally:
        _stack.pop()


def current_activity() -> Activity | None:
    """The innermost marked work of the process; None outside of all marks."""
    return _stack[-1] if _stack else None
