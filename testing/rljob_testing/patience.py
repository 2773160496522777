"""How long tests wait, and by which clock."""

from __future__ import annotations

import subprocess
import time

import psutil

PATIENCE_SECONDS = 480.0
"""For steps of a job, whose processes first import torch and vLLM: minutes on two cores that also run other tests. Less
than the 600 s after which pods are given up, which must not be what ends a wait."""


class Deadline:
    """So many seconds from now, by a clock that stands still while the hypervisor runs somebody else.

    On a busy host a guest may have a third of its processors for minutes. What is waited for is then late, not slow; a
    bound that allowed for it by the clock on the wall would let pass, at all other times, what is slow.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._stolen = _stolen_seconds()

    @property
    def passed(self) -> bool:
        # Of the processor that lost most: what is waited for may have run on that one.
        lost = max((now - then for now, then in zip(_stolen_seconds(), self._stolen, strict=True)), default=0.0)
        return time.monotonic() - lost > self._end


def wait_for_end(process: subprocess.Popen[str], seconds: float = PATIENCE_SECONDS) -> str:
    """What `process` prints until it ends. AssertionError, with what it has printed, where it does not end by then."""
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
