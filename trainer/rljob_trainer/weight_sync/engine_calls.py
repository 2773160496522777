"""Calls from the policy to the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def call_engines(engines: Sequence[Any], method: str, *arguments: Any) -> None:
    """Call `method` on all engines at once and wait for all; raises what the first failing one raised."""
    import ray

    ray.get([getattr(engine, method).remote(*arguments) for engine in engines])
