"""Memory of the caches: the limits are what ten thousand jobs on five thousand nodes can afford."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from pydantic_core import from_json

from rljob_operator.observe.observer import Observer
from rljob_testing.operator import manifests
from tests.unit.operator.observe.objects import job, node, pod, step_report

COUNT = 300
RANKS = 64
MEMORY = {
    name: 123_456_789_012
    for name in ("allocatedBytes", "reservedBytes", "peakAllocatedBytes", "peakReservedBytes", "deviceFreeBytes",
                 "deviceTotalBytes", "hostUsedBytes", "hostLimitBytes")
}  # fmt: skip


def job_of(number: int) -> dict[str, Any]:
    spec = manifests.job(policy={"replicas": 8, "template": {"spec": {"nodeSelector": {"gpu": "h200"}}}})["spec"]
    conditions = [
        {"type": f"Condition{n}", "status": "False", "reason": "NotYet", "message": f"a message of some length {n}" * 2}
        for n in range(7)
    ]
    return job(f"job-{number}", uid=f"uid-{number}", spec=spec, status={"conditions": conditions})


def report_of(number: int) -> dict[str, Any]:
    memory = [{"role": "policy", "rank": rank, "phase": "update", **MEMORY} for rank in range(RANKS)]
    report = step_report(step=1, memory=memory)
    return report | {"metadata": report["metadata"] | {"name": f"job-{number}"}}


@pytest.mark.parametrize(
    ("cache", "made", "most_bytes"),
    [
        ("jobs", job_of, 1_500),
        ("pods", lambda number: pod(f"job-{number}-controller"), 1_200),
        ("step_reports", report_of, 1_500),
        ("nodes", lambda number: node(f"node-{number}", gpus="8"), 700),
    ],
)
def test_what_stays_of_an_object(cache: str, made: Callable[[int], dict[str, Any]], most_bytes: int) -> None:
    observer = Observer(("nvidia.com/gpu",), lambda _: None)
    texts = [json.dumps(made(number)) for number in range(COUNT)]
    tracemalloc.start()
    try:
        for text in texts:
            getattr(observer, cache).put(from_json(text))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(getattr(observer, cache)) == COUNT
    assert kept / COUNT < most_bytes, f"{kept / COUNT:.0f} bytes of {len(texts[0])}"
