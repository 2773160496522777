"""Deadlines for tests on a busy machine, and waits for effects."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

PATIENCE_SECONDS = 480.0
"""Limit for steps of a job, whose processes first import torch and vLLM: minutes on two busy cores. Less than the 600 s
after which pods are given up, which must not end a wait first."""

RUN_PATIENCE_SECONDS = 3 * PATIENCE_SECONDS
"""Limit for a whole run, which may start its engines several times while tests of the cluster have precedence."""


class Deadline:
    """A deadline by a clock that stops while the hypervisor runs other guests.

    On a busy host a guest may have a third of its processors for minutes. A limit by wall clock would either fail then,
    or be too generous at all other times.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._stolen = _stolen_seconds()

    @property
    def passed(self) -> bool:
        # Of the processor that lost most: what is waited for may have run on that one.
        lost = max((now - then for now, then in zip(_stolen_seconds(), self._stolen, strict=True)), default=0.0)
        return time.monotonic() - lost > self._end


def wait_for_end(process: subprocess.Popen[str], seconds: float = RUN_PATIENCE_SECONDS) -> str:
    """The output of `process` until it ends. AssertionError, with the output so far, if it does not end in time."""
    deadline = Deadline(seconds)
    while True:
        try:
            return process.communicate(timeout=1.0)[0]
        except subprocess.TimeoutExpired as waiting:
            printed = (waiting.stdout or b"").decode(errors="replace")
            assert not deadline.passed, f"{process.args!r} has not ended after {seconds:g} s:\n{printed}"


def _stolen_seconds() -> list[float]:
    """By processor, since the machine started."""
    return [processor.steal for processor in psutil.cpu_times(percpu=True)]


# Waits for effects of a running operator.

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
