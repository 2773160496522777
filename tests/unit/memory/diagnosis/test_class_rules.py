"""Classes of failures whose numbers are known, from evidence that no single message contains.

A line of `numbers.jsonl` has the evidence: the memory of the `device`, the other `sizes` of a message, the `kind`,
`activity`, `role` and `phase` of the failure, the `engine`, the `model`, the policy's memory in GiB by step (`series`:
allocated, reserved), its `siblings`, the `programs` of the log, tables of `gpu_processes`, and the plan's
`rollout_sleep`. It expects the first `class` (if `is_alone` no other) with its `confidence`, `numbers` and `advice`,
classes that are diagnosed as well (`also`) or `not`, and parts of a `message`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import CollectedEvidence, Failure, FailureKind
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import EngineRecord, MemorySeries
from rljob_memory.evidence.failure import DeviceMemory, GpuProcess
from rljob_memory.evidence.model_facts import ModelFacts
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, MIB
from rljob_memory.trend import past_growth
from rljob_testing.memory_plans import memory_plan
from tests.unit.memory.diagnosis.recorded import in_bytes

LINES = Path(__file__).with_name("numbers.jsonl").read_text(encoding="utf-8").splitlines()


def processes(listed: list[tuple[int, str]]) -> tuple[GpuProcess, ...]:
    return tuple(GpuProcess(pid, used) for pid, used in in_bytes(dict(listed)).items())  # type: ignore[arg-type]


def device_of(numbers: dict[str, Any]) -> DeviceMemory:
    others = processes(numbers.pop("others", []))
    return DeviceMemory(**{f"{name}_bytes": size for name, size in in_bytes(numbers).items()}, gpu=0, others=others)


def series_of(steps: list[tuple[float, float]]) -> tuple[MemorySeries, ...]:
    samples = [
        MemorySample(
            allocated_bytes=int(allocated * GIB), reserved_bytes=int(reserved * GIB), step=step, phase="update"
        )
        for step, (allocated, reserved) in enumerate(steps, start=1)
    ]
    return (MemorySeries("policy-0", tuple(samples)),)


def evidence_of(case: dict[str, Any]) -> CollectedEvidence:
    failure = Failure(
        FailureKind[case.get("kind", "ALLOCATOR")],
        device=device_of(dict(case["device"])) if "device" in case else None,
        sizes={f"{name}_bytes": size for name, size in in_bytes(case.get("sizes", {})).items()},
        activity=Activity[case["activity"]] if "activity" in case else None,
        role=case.get("role"),
        phase=case.get("phase"),
    )
    return CollectedEvidence(
        failure,
        series=series_of(case["series"]) if "series" in case else (),
        engine=EngineRecord(**in_bytes(case.get("engine", {}))),
        gpu_processes={int(gpu): processes(table) for gpu, table in case.get("gpu_processes", {}).items()},
        siblings=tuple(case["siblings"]) if "siblings" in case else None,
        plan=memory_plan(rollout_sleep=case["rollout_sleep"]) if "rollout_sleep" in case else None,
        programs=tuple(case.get("programs", [])),
        model=ModelFacts(**case.get("model", {})),
    )


@pytest.mark.parametrize("case", map(json.loads, LINES), ids=lambda case: case["about"])
def test_the_numbers_decide_the_class(case: dict[str, Any]) -> None:
    found = diagnose(evidence_of(case))
    best, classes = found[0], [str(each.failure_class) for each in found]
    assert classes[0] == case["class"]
    assert len(classes) == 1 or "is_alone" not in case
    assert set(case.get("also", [])) <= set(classes)
    assert not set(case.get("not", [])) & set(classes)
    assert best.confidence == case.get("confidence", best.confidence)
    assert {**best.numbers, **in_bytes(case.get("numbers", {}))} == best.numbers
    assert all(part in best.advice for part in case.get("advice", []))
    messages = " ".join(each.message for each in found)
    assert all(part in messages for part in case.get("message", []))


def test_a_pass_on_a_gpu_full_of_retained_graphs_is_not_the_cause() -> None:
    device = {
        "requested": "2Gi",
        "total": "80Gi",
        "free": "1Gi",
        "allocated": "40Gi",
        "cached": "1Gi",
        "process": "42Gi",
    }
    growing = [(10 + 4 * step, 60) for step in range(10)]
    found = diagnose(evidence_of({"device": device, "activity": "LOGITS", "series": growing}))
    confidences = {each.failure_class: each.confidence for each in found}
    assert next(iter(confidences)) is FailureClass.RETAINED_GRAPH
    assert confidences[FailureClass.ACTIVATION_SPIKE] <= 0.5


def test_nothing_is_diagnosed_without_a_failure() -> None:
    assert diagnose(CollectedEvidence(series=series_of([(1, 2)] * 9))) == []


@pytest.mark.parametrize(
    "values",
    [
        [10 * GIB] * 20,
        [10 * GIB + step * MIB for step in range(20)],
        [10 * GIB + (step % 2) * 5 * GIB for step in range(20)],
        [10 * GIB, 11 * GIB, 12 * GIB],
        [10 * GIB] + [22 * GIB] * 19,
    ],
    ids=["flat", "a little", "to and fro", "too few", "one step up"],
)
def test_unsteady_growth_is_not_a_trend(values: list[int]) -> None:
    assert past_growth(values) is None
