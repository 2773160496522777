"""Element-wise functions as one kernel on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on first use, since importing the compiler takes seconds. Lengths are symbolic."""
    import torch

    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled
