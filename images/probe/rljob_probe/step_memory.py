"""Memory after each optimizer step: the last 64 samples, for the trend before a failure.

There is at most one sample in a quarter of a second; docs/benchmarks.md has their cost.
"""

from __future__ import annotations

import sys
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

SECONDS_BETWEEN_SAMPLES = 0.25
_MOST_SAMPLES, _MOST_WRITTEN = 64, 32

_samples: deque[tuple[int, int]] = deque(maxlen=_MOST_SAMPLES)
"""Bytes in tensors and bytes reserved; the first one is from before the first step."""
_taken_at = float("-inf")


def watch(torch: ModuleType) -> None:
    """Sample before the first step of any optimizer and after each one. Does nothing if torch has no such hooks."""
    optimizers = sys.modules.get("torch.optim.optimizer")
    register_before = getattr(optimizers, "register_optimizer_step_pre_hook", None)
    register_after = getattr(optimizers, "register_optimizer_step_post_hook", None)
    if register_before is None or register_after is None:
        return
    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", bool)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling() and not _samples:
            _sample(torch)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            _sample(torch)

    register_before(before)
    register_after(after)


def line() -> str:
    """The samples as a line that `rljob diagnose` reads; empty if there is none. Long series are thinned out."""
    if not _samples:
        return ""
    stride = -(-len(_samples) // _MOST_WRITTEN)
    latest_last = list(_samples)[::-1][::stride][::-1]
    gib = float(1 << 30)
    pairs = " ".join(f"{allocated / gib:.2f}/{reserved / gib:.2f}" for allocated, reserved in latest_last)
    return f"rljob-probe: allocated/reserved GiB after steps: {pairs}"


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
