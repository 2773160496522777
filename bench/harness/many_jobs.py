"""Many objects at once, and the times in their conditions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from bench.harness.operator_cluster import NAMESPACE
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ApiClient, Object

CLIENTS = 8
_LOOK_SECONDS = 5.0
"""Each poll lists all objects; it is rare so that it does not affect the measurement."""


def small_job(name: str, **template_spec: Any) -> Object:
    """A job with one controller and one worker, without a GPU, on an existing volume. `template_spec`: of both pods."""
    template = {"template": {"spec": template_spec}} if template_spec else {}
    return manifests.job(
        name,
        policy={"gpusPerReplica": 0, **template},
        checkpoint={"volume": {"nfs": {"server": "nfs.example", "path": "/jobs"}}},
        **({"controller": template} if template else {}),
    )


def in_parallel(work: Callable[[Any], object], items: Iterable[Any]) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(work, items))


def wait_until_all(
    api: ApiClient, count: int, condition: str, resource: str = "rljobs", seconds: float = 3600.0
) -> list[Object]:
    """The objects, once the condition is true for `count` of them. Raises TimeoutError after `seconds`."""
    give_up_at = time.monotonic() + seconds
    while True:
        there = [found for found in api.list(resource, NAMESPACE) if transition(found, condition)]
        print(f"{condition}: {len(there)}/{count}", flush=True)
        if len(there) == count:
            return there
        if time.monotonic() > give_up_at:
            raise TimeoutError(
                f"expected {count} {resource} with {condition} after {seconds:.0f} s, found {len(there)}"
            )
        time.sleep(_LOOK_SECONDS)


def transition(obj: Object, condition: str) -> str:
    """Time at which the condition became true; empty if it is not."""
    conditions = obj.get("status", {}).get("conditions", [])
    return next((c["lastTransitionTime"] for c in conditions if c["type"] == condition and c["status"] == "True"), "")


def seconds_after(began: float, timestamp: str) -> float:
    """Kubernetes stores whole seconds, so the result may be up to one second too small."""
    return datetime.fromisoformat(timestamp).timestamp() - began
