"""`kubectl rljob status` and `top` as text, from a status, a StepReport and pods."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType

from rljob_api.job import RLJob
from rljob_api.status import RLJobStatus
from rljob_api.step_report import StepReportStatus
from rljob_client.job_view import memory_table, status_tree
from rljob_testing.operator import manifests

NOW = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
GIB = 2**30


def shown(renderable: RenderableType) -> str:
    console = Console(file=StringIO(), width=300, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def condition(type_: str, status: str = "True", reason: str = "Reason", message: str = "") -> dict[str, Any]:
    return {"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": time(0)}


def time(minutes: int) -> str:
    return (NOW - timedelta(minutes=minutes)).isoformat()


def pod(role: str, index: int, **status: Any) -> dict[str, Any]:
    container = {"name": "rljob", "resources": {"limits": {"nvidia.com/gpu": "2", "memory": "8Gi"}}}
    labels = {"rljob.dev/role": role, "rljob.dev/index": str(index)}
    return {
        "metadata": {"name": f"job-{role}-{index}", "labels": labels},
        "spec": {"nodeName": "gpu-node", "containers": [container]},
        "status": status,
    }


READY = {"phase": "Running", "containerStatuses": [{"ready": True, "state": {"running": {}}}]}
DIAGNOSIS = {"class": "Fragmentation", "confidence": 0.9, "message": "[6.1 GiB] were reserved but unusable"}
CHANGE = {
    "generation": 2,
    "time": time(9),
    "attempt": 1,
    "step": 4,
    "phase": "update",
    "role": "policy",
    "diagnosis": DIAGNOSIS,
    "remedy": {"setting": "microBatchTokens", "before": "8192", "after": "4096"},
    "level": "RestartInPlace",
}
FAILED = {
    "number": 1,
    "planGeneration": 1,
    "startTime": time(20),
    "endTime": time(9),
    "fromStep": 1,
    "toStep": 3,
    "exitCode": 80,
    "reason": "DeviceOutOfMemory",
    "message": "a GPU ran out of memory",
}
STATUS = {
    "conditions": [
        condition("Running", message="step 5 is in progress"),
        condition("Fits", "False", "DoesNotFit", "the update needs 90 GiB"),
        condition("Failed", "False"),
        condition("Ready"),
    ],
    "step": 4,
    "steps": 10,
    "reward": 0.51234,
    "adjustments": 1,
    "plan": {**manifests.PLAN, "generation": 2},
    "planChanges": [CHANGE],
    "attempts": [FAILED, {"number": 2, "planGeneration": 2, "startTime": time(9), "fromStep": 4}],
    "lastOutOfMemory": {"time": time(9), "step": 4, "diagnosis": DIAGNOSIS},
    "display": {"phase": "Running", "step": "4/10", "reward": "0.5123"},
}
REPORT = {
    "step": 4,
    "phase": "update",
    "memory": [
        {"role": "policy", "rank": 3, "peakReservedBytes": 76 * GIB, "deviceTotalBytes": 80 * GIB},
        {
            "role": "controller",
            "rank": 0,
            "peakRssBytes": GIB,
            "hostUsedBytes": 3 * GIB,
            "hostLimitBytes": 4 * GIB,
        },
    ],
}


def tree(status: dict[str, Any], *pods: dict[str, Any]) -> str:
    job = RLJob.model_validate(manifests.job(policy={"replicas": 2, "gpusPerReplica": 2}))
    report = StepReportStatus.model_validate(REPORT)
    return shown(status_tree("job", job.spec, RLJobStatus.model_validate(status), report, pods, NOW))


def test_the_tree_has_the_conditions_that_matter_the_failure_and_the_remedy() -> None:
    lines = tree(STATUS, pod("policy", 1, **READY)).splitlines()
    assert lines[0] == "job  Running  step 4/10  in update  reward 0.5123  1 adjustment"
    text = "\n".join(lines)
    assert "Fits=False  DoesNotFit  the update needs 90 GiB" in text
    assert "Failed" not in text
    assert "Ready" not in text
    assert "memory plan, generation 2: emptyCache, expandableSegments, rolloutSleep Level1, kvCache 1Gi" in text
    assert "step 4: Fragmentation: microBatchTokens 8192 → 4096 (generation 2)" in text
    assert "[6.1 GiB] were reserved but unusable" in text
    assert "attempt 1  steps 1 to 3 in 11m, DeviceOutOfMemory (exit code 80): a GPU ran out of memory" in text
    assert "attempt 2  from step 4, for 9m" in text


def test_a_gpu_is_shown_below_the_pod_that_has_it() -> None:
    pods = [pod("policy", index, **READY) for index in (0, 1)]
    lines = [line.lstrip(" │├└─") for line in tree(STATUS, *pods).splitlines()]
    first = lines.index("job-policy-0  Running  gpu-node  2 × nvidia.com/gpu")
    assert lines[first + 1 : first + 3] == [
        "job-policy-1  Running  gpu-node  2 × nvidia.com/gpu",
        "GPU of policy 3: peak 76.00 GiB of 80.00 GiB",
    ]


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]}, "ErrImagePull"),
        ({"containerStatuses": [{"state": {"terminated": {"exitCode": 137}}}]}, "Terminated (exit code 137)"),
        ({"containerStatuses": [{"ready": False, "state": {"running": {}}}]}, "Running, not ready"),
        ({}, "Pending"),
    ],
)
def test_the_state_of_a_pod_is_its_reason(status: dict[str, Any], state: str) -> None:
    assert f"job-policy-0  {state}  gpu-node" in tree(STATUS, pod("policy", 0, **status))


def test_a_job_that_no_operator_has_seen_is_pending() -> None:
    assert tree({}).splitlines()[0].strip() == "job  Pending"


def test_memory_is_compared_with_its_limits() -> None:
    table = shown(memory_table(StepReportStatus.model_validate(REPORT))).splitlines()
    assert table[0] == "step 4"
    assert table[2].split() == ["controller", "0", "–", "–", "–", *["3.00", "GiB", "4.00", "GiB"], "–", "–"]
    assert "76.00 GiB  80.00 GiB" in table[3]
    assert "not reported" in shown(memory_table(None))


@pytest.mark.parametrize(("seconds", "text"), [(-3, "0s"), (59, "59s"), (61, "1m"), (11_520, "3h12m")])
def test_the_duration_of_an_attempt_is_shown(seconds: float, text: str) -> None:
    begun = {**STATUS["attempts"][1], "startTime": (NOW - timedelta(seconds=seconds)).isoformat()}  # type: ignore[index]
    assert f"from step 4, for {text}" in tree({**STATUS, "attempts": [begun]})
