"""Calls from the policy to the engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from rljob_trainer.errors import WorkerLost


class EngineCalls:
    """Calls to all engines at once. An engine serves them in order, so they need not be awaited one by one."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self.engines = engines
        self._pending: deque[list[Any]] = deque()

    def begin(self, method: str, *arguments: Any) -> None:
        self._pending.append([getattr(engine, method).remote(*arguments) for engine in self.engines])

    def wait(self, *, until_left: int = 0) -> None:
        """Return when at most `until_left` calls are under way; raises what the first failing one raised.

        Raises `WorkerLost` where an engine has died.
        """
        import ray
        from ray import exceptions

        while len(self._pending) > until_left:
            for rank, reference in enumerate(self._pending.popleft()):
                try:
                    ray.get(reference)
                except exceptions.RayActorError as error:
                    engine = f"rollout-{rank}"
                    raise WorkerLost(f"{engine} died while receiving the weights").of(engine) from error
