"""Calls from the policy to the engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any


class EngineCalls:
    """Calls to all engines at once. An engine serves them in order, so they need not be awaited one by one."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self.engines = engines
        self._pending: deque[list[Any]] = deque()

    def begin(self, method: str, *arguments: Any) -> None:
        self._pending.append([getattr(engine, method).remote(*arguments) for engine in self.engines])

    def wait(self, *, until_left: int = 0) -> None:
        """Return when at most `until_left` calls are under way; raises what the first failing one raised."""
        import ray

        while len(self._pending) > until_left:
            ray.get(self._pending.popleft())
