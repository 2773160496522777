"""Waits for effects of a running operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rljob_testing.patience import Deadline

Result = TypeVar("Result")

POLL_SECONDS = 0.05


EFFECT_SECONDS = 240.0
"""Limit for one effect: processes of other tests may leave API server and operator a tenth of two cores for a while."""


def eventually(
    look: Callable[[], Result],
    expected: str,
    timeout: float = EFFECT_SECONDS,
    context: Callable[[], object] | None = None,
) -> Result:
    """The first truthy result of `look`. An AssertionError raised inside it counts as not yet.

    `expected` names the awaited effect in the error after `timeout` seconds; `context` adds the present state.
    """
    deadline = Deadline(timeout)
    found: object = None
    while not deadline.passed:
        try:
            if result := look():
                return result
            found = result
        except AssertionError as error:
            found = error
        time.sleep(POLL_SECONDS)
    seen = found if context is None else context()
    raise AssertionError(f"waited {timeout:g} s for: {expected}; found: {seen}")


def holds_for(seconds: float, check: Callable[[], bool], expected: str) -> None:
    """Assert that `check` stays true: for effects that must not happen."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert check(), f"expected for {seconds:g} s: {expected}"
        time.sleep(POLL_SECONDS)
