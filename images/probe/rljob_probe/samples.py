"""Work of the process and its memory over time: markers of torch's and vLLM's functions, and a sample after each step.

Neither waits for a GPU. There is at most one sample in a quarter of a second; docs/benchmarks.md has their cost.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from types import ModuleType
from typing import Any, Callable

from rljob_probe.import_hooks import after_import

SECONDS_BETWEEN_SAMPLES = 0.25
_MOST_SAMPLES, _MOST_WRITTEN = 64, 32

_STEP = "OptimizerStep"

_samples: deque[tuple[int, int]] = deque(maxlen=_MOST_SAMPLES)
"""Bytes in tensors and bytes reserved; the first one is from before the first step."""
_taken_at = float("-inf")
_activities: list[str] = []
"""Marked work, the innermost last: values of `rljob_api.memory_failure.Activity`."""


def activity() -> str | None:
    """The innermost marked work of the process; None outside of all marks."""
    return _activities[-1] if _activities else None


def taken() -> list[dict[str, int]]:
    """The samples as JSON values, the latest one last. Long series are thinned out."""
    stride = -(-len(_samples) // _MOST_WRITTEN) or 1
    latest_last = list(_samples)[::-1][::stride][::-1]
    return [{"allocatedBytes": allocated, "reservedBytes": reserved} for allocated, reserved in latest_last]


def watch(torch: ModuleType) -> None:
    """Mark backward passes, optimizer steps, and the engine's sleep and wake-up; sample after optimizer steps."""
    autograd = getattr(torch, "autograd", None)
    if autograd is not None and hasattr(autograd, "backward"):
        autograd.backward = _marked(autograd.backward, "Backward")
    after_import("vllm.device_allocator.cumem", _watch_engine)
    _watch_steps(torch)


def _watch_engine(module: ModuleType) -> None:
    allocator = getattr(module, "CuMemAllocator", None)
    for name, work in (("sleep", "Sleep"), ("wake_up", "WakeUp")):
        if hasattr(allocator, name):
            setattr(allocator, name, _marked(getattr(allocator, name), work))


def _marked(function: Callable[..., Any], work: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def marked(*given: Any, **named: Any) -> Any:
        _end_step()
        _activities.append(work)
        try:
            return function(*given, **named)
        finally:
            _activities.pop()

    return marked


def _watch_steps(torch: ModuleType) -> None:
    """Does nothing if torch has no hooks for the steps of all optimizers."""
    optimizers = sys.modules.get("torch.optim.optimizer")
    register_before = getattr(optimizers, "register_optimizer_step_pre_hook", None)
    register_after = getattr(optimizers, "register_optimizer_step_post_hook", None)
    if register_before is None or register_after is None:
        return
    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", bool)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling():
            return
        if not _samples:
            _sample(torch)
        _end_step()
        _activities.append(_STEP)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            _end_step()
            _sample(torch)

    register_before(before)
    register_after(after)


def _end_step() -> None:
    """There is no hook for a step that raised an error: other work shows that it is over."""
    if _STEP in _activities:
        _activities.remove(_STEP)


def _sample(torch: ModuleType) -> None:
    global _taken_at
    now = time.monotonic()
    if _samples and now - _taken_at < SECONDS_BETWEEN_SAMPLES and len(_samples) > 1:
        return
    try:
        stats = torch.cuda.memory_stats()
        _samples.append((stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]))
        _taken_at = now
    except Exception:
        pass  # the step of the program matters more
