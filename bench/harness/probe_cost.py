"""Times of the probe's samples and hooks, measured in the process that the probe is in."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

WARM_UP = 50
HOOKS_A_BATCH = 500
"""Hooks timed together: one takes less than a microsecond. No sample becomes due in the time of a batch."""

Seconds = dict[str, float]
Hook = Callable[[Any, Any, Any], None]


def summary(seconds: Sequence[float]) -> Seconds:
    return {"median": statistics.median(seconds), "highest": max(seconds), "count": len(seconds)}


def sample_seconds(step_memory: Any, torch: ModuleType, count: int, warm_up: int = WARM_UP) -> list[float]:
    """Seconds of each of `count` samples, one after another. Raises RuntimeError if one was not taken."""
    return [_seconds_of_a_sample(step_memory, torch) for _ in range(warm_up + count)][warm_up:]


def _seconds_of_a_sample(step_memory: Any, torch: ModuleType) -> float:
    step_memory._taken_at = float("-inf")
    begun = time.perf_counter()
    step_memory._sample(torch)
    seconds = time.perf_counter() - begun
    if step_memory._taken_at == float("-inf"):
        raise RuntimeError("expected a sample of torch.cuda.memory_stats(), found none; check that the call succeeds")
    return seconds


def idle_hook_seconds(step_memory: Any, torch: ModuleType, hooks: Sequence[Hook], batches: int) -> float:
    """Median seconds that all `hooks` of a step take together while no sample is due."""
    sample_seconds(step_memory, torch, 2, warm_up=0)  # the first two samples ignore the interval
    seconds = []
    for _ in range(batches):
        step_memory._taken_at = time.monotonic()
        begun = time.perf_counter()
        for _ in range(HOOKS_A_BATCH):
            for hook in hooks:
                hook(None, (), {})
        seconds.append((time.perf_counter() - begun) / HOOKS_A_BATCH)
    return statistics.median(seconds)


def step_percent(sample: float, hooks: float, step: float, interval: float) -> float:
    """Largest share of a step of `step` seconds: a sample in each `interval`, and the hooks once per step."""
    return 100 * (sample / interval + hooks / step)


def probe_hooks(registered: MutableMapping[int, Hook]) -> dict[int, Hook]:
    """The probe's hooks among all hooks that torch calls for an optimizer step."""
    return {key: hook for key, hook in registered.items() if hook.__module__ == "rljob_probe.step_memory"}


@contextmanager
def timed_hooks(registered: MutableMapping[int, Hook]) -> Iterator[list[float]]:
    """Yields a list that the seconds of each call of the probe's hooks are added to, as torch calls them."""
    seconds: list[float] = []
    own = probe_hooks(registered)

    def timed(hook: Hook) -> Hook:
        def call(optimizer: Any, args: Any, kwargs: Any) -> None:
            begun = time.perf_counter()
            hook(optimizer, args, kwargs)
            seconds.append(time.perf_counter() - begun)

        return call

    registered.update({key: timed(hook) for key, hook in own.items()})
    try:
        yield seconds
    finally:
        registered.update(own)


def probe_calls(step: Callable[[], object], steps: int) -> dict[str, int]:
    """Calls of each function of the probe during some steps, in the thread that calls `step`."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "rljob_probe" in frame.f_code.co_filename:
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(None)
    return dict(calls)
