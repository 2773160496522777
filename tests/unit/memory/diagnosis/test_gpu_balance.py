"""The balance of the GPU, who holds what and what is more than expected, and the class that follows from the numbers.

A line of `numbers.jsonl` has the evidence: the memory of the `device`, the other `sizes` of a message, the `kind`,
`activity`, `role` and `phase` of the failure, the `engine`, the `model`, the policy's memory in GiB by step (`series`:
allocated, reserved), its `siblings`, the `programs` of the log, tables of `gpu_processes`, and the plan's
`rollout_sleep`. It expects the first `class` (if `is_alone` no other) with its `confidence`, `numbers` and `advice`,
classes that are diagnosed as well (`also`) or `not`, and parts of a `message`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rljob_api.memory_failure import Activity
from rljob_api.plan_change import Role
from rljob_memory.budget import Setup, budget, setup_of_facts
from rljob_memory.diagnosis import (
    Balance,
    BalanceEntry,
    FailureClass,
    Weight,
    diagnose,
    found_causes,
    gpu_entries,
    host_entries,
)
from rljob_memory.diagnosis.expected import expected_of
from rljob_memory.evidence import CollectedEvidence, Failure, FailureKind
from rljob_memory.evidence.collected import EngineRecord, MemorySeries
from rljob_memory.evidence.failure import DeviceMemory, GpuProcess
from rljob_memory.evidence.model_facts import ModelFacts
from rljob_memory.recovery.other_machine import plan_facts
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, MIB
from rljob_memory.trend import past_growth
from rljob_testing.memory_plans import memory_plan
from tests.unit.memory.diagnosis.recorded import evidence_of, in_bytes, json_lines
from tests.unit.memory.recovery.failures import FIRST_PLAN, SETUP

BESIDE = DeviceMemory(
    requested_bytes=2 * GIB,
    gpu=0,
    total_bytes=80 * GIB,
    free_bytes=GIB,
    allocated_bytes=36 * GIB,
    cached_bytes=GIB,
    process_bytes=38 * GIB,
)
"""41 GiB of the GPU belong to other processes."""
ALONE = BESIDE.model_copy(update={"allocated_bytes": 77 * GIB, "process_bytes": 79 * GIB})


def failing(
    device: DeviceMemory = BESIDE, activity: Activity = Activity.BACKWARD, *, role: Role | None = None, **of: Any
) -> CollectedEvidence:
    return CollectedEvidence(
        failure=Failure(kind=FailureKind.ALLOCATOR, device=device, activity=activity, role=role), **of
    )


def beside(*siblings: str, role: Role | None = "policy") -> CollectedEvidence:
    return failing(role=role, siblings=siblings)


def entries_of(evidence: CollectedEvidence) -> list[BalanceEntry]:
    assert evidence.failure is not None
    return gpu_entries(Balance(evidence.failure, evidence))


# --- who holds the memory ---

LISTED = BESIDE.model_copy(update={"others": [GpuProcess(pid=7, used_bytes=40 * GIB)]})


@pytest.mark.parametrize(
    ("evidence", "owner", "size_gib"),
    [
        (beside("python", "VLLM::EngineCor"), "engines of the same job (VLLM::EngineCor), and the driver", 41),
        (beside("python"), "other processes of the same job (python), and the driver", 41),
        (beside(), "other processes, and the driver", 41),
        (
            failing(BESIDE.model_copy(update={"process_bytes": None}), role="policy"),
            "unexplained: other processes, or this one outside torch",
            42,
        ),
        (failing(LISTED), "process 7", 40),
        (failing(LISTED), "the driver", 1),
    ],
)
def test_every_part_of_the_gpu_has_the_owner_that_is_known(
    evidence: CollectedEvidence, owner: str, size_gib: int
) -> None:
    entries = entries_of(evidence)
    assert {entry.owner: entry.size_bytes for entry in entries}[owner] == size_gib * GIB
    assert sum(entry.size_bytes for entry in entries if not (entry.is_part or entry.is_expected)) == 80 * GIB


def test_memory_of_a_sleeping_engine_is_back_with_the_gpu() -> None:
    sizes_asleep = {"allocated_bytes": 84 * GIB, "cached_bytes": 30 * GIB, "process_bytes": 77 * GIB}
    asleep = BESIDE.model_copy(update=sizes_asleep)
    sizes = {entry.owner: entry.size_bytes for entry in entries_of(failing(asleep))}
    assert sizes["an engine that sleeps, whose memory is back with the GPU"] == 37 * GIB


def test_an_engine_that_starts_finds_the_gpu_in_use() -> None:
    sizes = {"free_bytes": 30 * GIB, "total_bytes": 80 * GIB, "wanted_bytes": 72 * GIB}
    refused = CollectedEvidence(failure=Failure(kind=FailureKind.ENGINE_START, sizes=sizes))
    assert [(entry.owner, entry.size_bytes) for entry in entries_of(refused)] == [
        ("in use before the engine started", 50 * GIB),
        ("free", 30 * GIB),
    ]
    assert host_entries(refused) == []


def test_the_host_has_a_ledger() -> None:
    host = MemorySample(host_used_bytes=31 * GIB, host_limit_bytes=32 * GIB, shared_memory_bytes=GIB)
    engine = EngineRecord(seen=True, backed_up_bytes=14 * GIB)
    entries = host_entries(CollectedEvidence(failure=Failure(kind=FailureKind.KILLED), host=host, engine=engine))
    assert {entry.owner: entry.size_bytes for entry in entries} == {
        "limit": 32 * GIB,
        "in use": 31 * GIB,
        "weights of an engine that sleeps, pinned": 14 * GIB,
        "size of /dev/shm": GIB,
    }


def test_each_cause_has_its_excess_and_the_largest_comes_first() -> None:
    evidence = beside("VLLM::EngineCor")
    assert evidence.failure is not None
    causes = dict(found_causes(Balance(evidence.failure, evidence)))
    assert next(iter(causes)) is FailureClass.ENGINE_NOT_ASLEEP
    assert causes[FailureClass.ENGINE_NOT_ASLEEP].excess_bytes == 41 * GIB
    spike = causes[FailureClass.ACTIVATION_SPIKE]
    assert (spike.weight, spike.excess_bytes) == (Weight.FAINT, 2 * GIB)


# --- the engine's parts ---


def test_the_engines_log_has_its_parts() -> None:
    evidence = evidence_of(
        "INFO gpu_model_runner.py:5348] Model loading took 14.25 GiB memory and 3.100000 seconds\n"
        "INFO gpu_worker.py:300] Available KV cache memory: 22.50 GiB\n"
        "INFO gpu_model_runner.py:6845] Graph capturing finished in 20 secs, took 0.75 GiB"
    )
    engine = evidence.engine
    assert (engine.weights_bytes, engine.kv_cache_bytes, engine.graphs_bytes) == (14.25 * GIB, 22.5 * GIB, 0.75 * GIB)
    failure = Failure(kind=FailureKind.ALLOCATOR, device=BESIDE, activity=Activity.BACKWARD)
    balance = Balance(failure, replace(evidence, failure=failure))
    assert balance.engine_bytes == 37.5 * GIB
    assert balance.has_an_unexpected_holder


def test_the_share_of_an_engine_decides_its_confidence() -> None:
    """In the failing process, whose tensors it is a part of."""
    asleep, spike = [], []
    for kv_cache in (24, 40, 60):
        engine = EngineRecord(seen=True, in_process=True, kv_cache_bytes=kv_cache * GIB)
        found = diagnose(failing(ALONE, Activity.LOGITS, engine=engine))
        by_class = {each.failure_class: each.confidence for each in found}
        asleep.append(by_class[FailureClass.ENGINE_NOT_ASLEEP])
        spike.append(by_class[FailureClass.ACTIVATION_SPIKE])
    assert asleep == sorted(asleep)
    assert spike == sorted(spike, reverse=True)
    assert asleep[0] > spike[0]


# --- the model's state ---

PARAMETERS = 6_600_000_000
"""Weights and gradients in 16 bits and Adam's state take 73.8 GiB."""


def test_the_name_of_a_model_is_a_guess() -> None:
    evidence = failing(ALONE, model=ModelFacts(parameters_of_name=PARAMETERS))
    expected = [entry for entry in entries_of(evidence) if entry.is_expected]
    assert [entry.owner for entry in expected] == ["weights", "gradients", "Adam's state"]
    assert all("by the model's name" in entry.source for entry in expected)


def test_trained_parameters_are_all_unless_a_name_has_many_more() -> None:
    for name in (None, 7_000_000_000):
        expected = expected_of(ModelFacts(trained_parameters=PARAMETERS, parameters_of_name=name))
        assert expected is not None
        assert (expected.parameters, expected.is_guess) == (PARAMETERS, False)
    adapters = expected_of(ModelFacts(trained_parameters=20_000_000, parameters_of_name=7_000_000_000))
    assert adapters is not None
    assert (adapters.parameters, adapters.optimizer_bytes, adapters.is_guess) == (7_000_000_000, 160_000_000, True)


# --- the budget of the job ---

SMALL_GPU = replace(SETUP, hardware=replace(SETUP.hardware, device_memory_bytes=40 * GIB))
BUDGET = budget(SMALL_GPU, FIRST_PLAN).of("gpu")
UPDATE_BYTES = BUDGET.in_torch("policy", "update")
SLEEPING_BYTES = BUDGET.bytes_of("sleeping engine", "gpu")


def within_its_budget(others_bytes: int, setup: Setup | None = SMALL_GPU) -> CollectedEvidence:
    """A policy in a backward pass, and other processes that hold so much of its GPU; 2 GiB more than is free."""
    process_bytes = UPDATE_BYTES + GIB
    free_bytes = 40 * GIB - process_bytes - others_bytes
    device = DeviceMemory(
        requested_bytes=free_bytes + 2 * GIB,
        total_bytes=40 * GIB,
        free_bytes=free_bytes,
        allocated_bytes=UPDATE_BYTES,
        cached_bytes=0,
        process_bytes=process_bytes,
    )
    evidence = failing(device, role="policy", plan=FIRST_PLAN, setup=setup, is_of_rljob=True)
    assert evidence.failure is not None
    return replace(evidence, failure=evidence.failure.changed(phase="update"))


def test_tensors_of_a_job_are_expected_by_its_budget() -> None:
    expected = {
        entry.owner: entry.size_bytes for entry in entries_of(within_its_budget(SLEEPING_BYTES)) if entry.is_expected
    }
    assert sum(expected.values()) == UPDATE_BYTES
    assert expected["moments"] == 8 * SETUP.model.parameters
    assert {"weights", "masters", "gradients", "activations", "logits"} <= expected.keys()


@pytest.mark.parametrize(
    ("more_bytes", "setup", "cause"),
    [
        (0, SMALL_GPU, FailureClass.ACTIVATION_SPIKE),
        (4 * GIB, SMALL_GPU, FailureClass.FOREIGN_PROCESS),
        (4 * GIB, None, FailureClass.ACTIVATION_SPIKE),
    ],
)
def test_the_excess_over_the_budget_names_the_class(more_bytes: int, setup: Setup | None, cause: FailureClass) -> None:
    """An excess that is less than a quarter of the GPU shows nothing without a budget."""
    assert diagnose(within_its_budget(SLEEPING_BYTES + more_bytes, setup))[0].failure_class is cause


def test_an_engine_that_stays_awake_by_the_plan_is_expected() -> None:
    plan = FIRST_PLAN.model_copy(update={"rollout_sleep": "Disabled"})
    lines = budget(SETUP, plan).uses("gpu", "update")
    engine_bytes = sum(line.bytes for line in lines if line.owner == "engine")
    for more_bytes in (0, 20 * GIB):
        device = BESIDE.model_copy(
            update={
                "total_bytes": 140 * GIB,
                "process_bytes": 138 * GIB - engine_bytes - more_bytes,
                "allocated_bytes": 137 * GIB - engine_bytes - more_bytes,
                "free_bytes": GIB,
            }
        )
        evidence = failing(device, role="policy", plan=plan, setup=SETUP)
        assert evidence.failure is not None
        balance = Balance(evidence.failure.changed(phase="update"), evidence)
        assert balance.has_an_unexpected_holder == bool(more_bytes)


@pytest.mark.parametrize("damage", [{"layers": 0}, {"moment_bytes": math.nan}, {"topology": 7}, {"hidden": "wide"}])
def test_damaged_facts_are_no_setup(damage: dict[str, Any]) -> None:
    facts = plan_facts(SETUP)
    assert setup_of_facts(facts) == replace(SETUP, hardware=replace(SETUP.hardware, shared_memory_bytes=0))
    assert setup_of_facts(facts | damage) is None


# --- classes, from evidence that no single message contains ---

NUMBERS = json_lines(Path(__file__).with_name("numbers.jsonl"))
FIELDS = {
    *("about", "kind", "device", "sizes", "activity", "role", "phase", "series", "engine", "gpu_processes", "siblings"),
    *("rollout_sleep", "programs", "model", "class", "is_alone", "also", "not", "confidence", "numbers", "advice"),
    "message",
}


def processes(listed: list[tuple[int, str]]) -> list[GpuProcess]:
    return [GpuProcess(pid=pid, used_bytes=used) for pid, used in in_bytes(dict(listed)).items()]  # type: ignore[arg-type]


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


def evidence_with(case: dict[str, Any]) -> CollectedEvidence:
    failure = Failure(
        kind=FailureKind[case.get("kind", "ALLOCATOR")],
        device=device_of(dict(case["device"])) if "device" in case else None,
        sizes={f"{name}_bytes": size for name, size in in_bytes(case.get("sizes", {})).items()},
        activity=Activity[case["activity"]] if "activity" in case else None,
        role=case.get("role"),
        phase=case.get("phase"),
    )
    return CollectedEvidence(
        failure=failure,
        series=series_of(case["series"]) if "series" in case else (),
        engine=EngineRecord(**in_bytes(case.get("engine", {}))),
        gpu_processes={int(gpu): processes(table) for gpu, table in case.get("gpu_processes", {}).items()},
        siblings=tuple(case["siblings"]) if "siblings" in case else None,
        plan=memory_plan(rollout_sleep=case["rollout_sleep"]) if "rollout_sleep" in case else None,
        programs=case.get("programs", []),
        model=ModelFacts(**case.get("model", {})),
    )


@pytest.mark.parametrize("case", NUMBERS, ids=lambda case: case["about"])
def test_the_numbers_decide_the_class(case: dict[str, Any]) -> None:
    assert case.keys() <= FIELDS
    found = diagnose(evidence_with(case))
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
    growing = series_of([(10 + 4 * step, 60) for step in range(10)])
    found = diagnose(failing(BESIDE, Activity.LOGITS, series=growing))
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
