"""Diagnoses from evidence that no single message contains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose, gpu_entries, ledger_of
from rljob_memory.evidence import CollectedEvidence, Failure, FailureKind
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import EngineRecord, MemorySeries
from rljob_memory.evidence.failure import DeviceMemory, GpuProcess
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, MIB
from rljob_memory.trend import past_growth
from rljob_testing.memory_plans import memory_plan

WAKE = Failure(FailureKind.ENGINE_WAKE, activity=Activity.WAKE)
FULL = DeviceMemory(
    2 * GIB,
    gpu=0,
    total_bytes=80 * GIB,
    free_bytes=GIB,
    allocated_bytes=40 * GIB,
    cached_bytes=GIB,
    process_bytes=42 * GIB,
)
"""37 GiB of it are not the process's own."""


def best(evidence: CollectedEvidence) -> Diagnosis:
    return diagnose(evidence)[0]


def series(allocated: Sequence[int], reserved: Sequence[int], phase: str = "update") -> MemorySeries:
    samples = [
        MemorySample(allocated_bytes=a, reserved_bytes=r, step=step, phase=phase)
        for step, (a, r) in enumerate(zip(allocated, reserved, strict=True), start=1)
    ]
    return MemorySeries("policy-0", tuple(samples))


def test_a_failed_wake_up_beside_a_large_cache_is_the_allocator_cache() -> None:
    hoarding = series([10 * GIB], [30 * GIB])
    found = best(CollectedEvidence(WAKE, series=(hoarding,)))
    assert (found.failure_class, found.confidence) == (FailureClass.ALLOCATOR_CACHE, 0.85)
    assert found.numbers["policy_cache_bytes"] == 20 * GIB


def test_a_failed_wake_up_beside_an_empty_cache_is_the_kv_cache() -> None:
    tidy = series([10 * GIB], [10 * GIB + 100 * MIB])
    assert best(CollectedEvidence(WAKE, series=(tidy,))).failure_class is FailureClass.KV_CACHE_OVERSIZED


def test_growing_reserved_memory_with_flat_tensors_is_allocator_cache() -> None:
    rising = series([10 * GIB] * 10, [30 * GIB + step * GIB for step in range(10)])
    found = best(CollectedEvidence(WAKE, series=(rising,)))
    assert found.failure_class is FailureClass.ALLOCATOR_CACHE
    assert found.numbers["reserved_last_bytes"] == 39 * GIB


def test_tensors_that_grow_step_by_step_are_a_retained_graph() -> None:
    rising = series([10 * GIB + step * GIB for step in range(10)], [30 * GIB] * 10)
    failure = Failure(FailureKind.ALLOCATOR, device=FULL, activity=Activity.BACKWARD)
    assert best(CollectedEvidence(failure, series=(rising,))).failure_class is FailureClass.RETAINED_GRAPH


def test_an_engine_whose_sleep_freed_nothing_is_named() -> None:
    engine = EngineRecord(seen=True, asleep=True, freed_bytes=0, still_in_use_bytes=63 * GIB)
    found = best(
        CollectedEvidence(Failure(FailureKind.ALLOCATOR, device=FULL, activity=Activity.BACKWARD), engine=engine)
    )
    assert (found.failure_class, found.confidence) == (FailureClass.ENGINE_NOT_ASLEEP, 0.9)


def test_an_engine_that_never_slept_comes_before_a_foreign_process() -> None:
    failure = Failure(FailureKind.ALLOCATOR, device=FULL, activity=Activity.BACKWARD)
    classes = [found.failure_class for found in diagnose(CollectedEvidence(failure, engine=EngineRecord(seen=True)))]
    assert classes[0] is FailureClass.ENGINE_NOT_ASLEEP
    assert FailureClass.FOREIGN_PROCESS in classes


def test_memory_of_others_without_an_engine_is_a_foreign_process() -> None:
    assert (
        best(CollectedEvidence(Failure(FailureKind.ALLOCATOR, device=FULL))).failure_class
        is FailureClass.FOREIGN_PROCESS
    )


def test_pinning_host_memory_fails_in_the_words_of_the_gpu() -> None:
    failure = Failure(FailureKind.DRIVER, "CUDA error: out of memory", activity=Activity.PINNING)
    assert best(CollectedEvidence(failure)).failure_class is FailureClass.HOST_MEMORY


def test_contexts_in_a_process_table_are_counted() -> None:
    contexts = tuple(GpuProcess(pid, 871 * MIB) for pid in range(2, 9))
    table = {0: (GpuProcess(1, 26_167 * MIB), *contexts)}
    found = best(CollectedEvidence(Failure(FailureKind.DRIVER, "CUDA error: out of memory"), gpu_processes=table))
    assert found.failure_class is FailureClass.CONTROLLER_CONTEXT
    assert found.numbers["context_processes"] == 7


@pytest.mark.parametrize(("phase", "expected"), [("sync", "WeightSyncSpike"), ("update", "ActivationSpike")])
def test_the_phase_stands_in_for_a_missing_traceback(phase: str, expected: str) -> None:
    full = DeviceMemory(2 * GIB, 0, 80 * GIB, GIB, 70 * GIB, GIB, process_bytes=73 * GIB)
    failure = Failure(FailureKind.ALLOCATOR, device=full, role="policy", phase=phase)
    assert str(best(CollectedEvidence(failure)).failure_class) == expected


def test_nothing_is_diagnosed_without_a_failure() -> None:
    assert diagnose(CollectedEvidence(series=(series([1] * 9, [2] * 9),))) == []


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


def test_a_pass_on_a_gpu_full_of_retained_graphs_is_not_the_cause() -> None:
    growing = series([10 * GIB + step * 4 * GIB for step in range(10)], [60 * GIB] * 10)
    spike = Failure(FailureKind.ALLOCATOR, device=FULL, activity=Activity.LOGITS)
    found = {
        diagnosis.failure_class: diagnosis.confidence
        for diagnosis in diagnose(CollectedEvidence(spike, series=(growing,)))
    }
    assert next(iter(found)) is FailureClass.RETAINED_GRAPH
    assert found[FailureClass.ACTIVATION_SPIKE] <= 0.5


def test_a_failed_start_check_beside_the_own_policy_is_the_kv_cache() -> None:
    sizes = {"free_bytes": 80 * GIB, "total_bytes": 140 * GIB, "wanted_bytes": 126 * GIB}
    check = Failure(FailureKind.ENGINE_START, sizes=sizes)
    policy = series([56 * GIB], [57 * GIB])
    assert best(CollectedEvidence(check, series=(policy,))).failure_class is FailureClass.KV_CACHE_OVERSIZED
    assert best(CollectedEvidence(check)).failure_class is FailureClass.FOREIGN_PROCESS


def test_memory_that_cannot_be_mapped_for_the_kv_cache_is_its_size() -> None:
    found = best(CollectedEvidence(Failure(FailureKind.ENGINE_WAKE, activity=Activity.KV_CACHE)))
    assert (found.failure_class, found.confidence) == (FailureClass.KV_CACHE_OVERSIZED, 0.75)


def plan_with(sleep_level: Literal[0, 1, 2]) -> MemoryPlan:
    return memory_plan(
        rollout_sleep="Level1" if sleep_level else "Disabled",
        micro_batch_tokens=1024,
        logprob_chunk_tokens=256,
        sync_bucket_bytes=GIB,
    )


@pytest.mark.parametrize(
    ("sleep_level", "phase", "expected"),
    [
        (0, "update", FailureClass.ENGINE_NOT_ASLEEP),
        (2, "update", FailureClass.FOREIGN_PROCESS),
        (2, "load", FailureClass.FOREIGN_PROCESS),
    ],
)
def test_a_sleeping_engine_is_not_blamed_for_foreign_memory(
    sleep_level: Literal[0, 1, 2], phase: str, expected: FailureClass
) -> None:
    full = Failure(FailureKind.ALLOCATOR, device=FULL, role="policy", rank=0, step=3, phase=phase)
    assert best(CollectedEvidence(full, plan=plan_with(sleep_level))).failure_class is expected


def test_the_policy_of_the_job_is_no_foreign_process() -> None:
    policy = MemorySeries("policy-0", (MemorySample(allocated_bytes=16 * GIB, reserved_bytes=17 * GIB),))
    device = DeviceMemory(GIB, total_bytes=140 * GIB, free_bytes=GIB, process_bytes=21 * GIB)  # 118 GiB are others'
    failure = Failure(FailureKind.ALLOCATOR, device=device, role="rollout", rank=0, step=1, phase="sync")
    evidence = CollectedEvidence(failure, series=(policy,), plan=plan_with(2))
    found = next(each for each in diagnose(evidence) if each.failure_class is FailureClass.FOREIGN_PROCESS)
    assert found.numbers["other_processes_bytes"] == 101 * GIB
    assert "held by other processes, besides 17.00 GiB of the policy" in found.message


def test_the_rest_beside_the_policy_of_the_job_is_the_drivers() -> None:
    policy = MemorySeries("policy-0", (MemorySample(allocated_bytes=16 * GIB, reserved_bytes=17 * GIB),))
    device = DeviceMemory(GIB, total_bytes=40 * GIB, free_bytes=GIB, process_bytes=21 * GIB)  # 18 GiB are others'
    failure = Failure(FailureKind.ALLOCATOR, device=device, role="rollout", rank=0, step=1, phase="sync")
    for series_, expected in (((policy,), False), ((), True)):
        found = diagnose(CollectedEvidence(failure, series=series_, plan=plan_with(2)))
        assert (FailureClass.FOREIGN_PROCESS in {each.failure_class for each in found}) is expected


def test_the_sleeping_engine_is_no_process_that_only_touched_the_gpu() -> None:
    full = Failure(
        FailureKind.ALLOCATOR,
        device=DeviceMemory(64 * MIB, 0, 80 * GIB, 0, 70 * GIB, GIB, others=(GpuProcess(2, 910 * MIB),)),
        role="policy",
        phase="update",
    )
    told = [diagnosis.failure_class for diagnosis in diagnose(CollectedEvidence(full, plan=plan_with(2)))]
    assert FailureClass.CONTROLLER_CONTEXT not in told
    assert FailureClass.CONTROLLER_CONTEXT in {found.failure_class for found in diagnose(CollectedEvidence(full))}


FULL_OF_TENSORS = DeviceMemory(
    9 * GIB, gpu=0, total_bytes=140 * GIB, free_bytes=3 * GIB, allocated_bytes=134 * GIB, cached_bytes=3 * GIB // 2
)


def test_an_engine_awake_in_the_failing_process_is_named() -> None:
    """TRL, colocated: torch counts the KV cache of the engine among the tensors of the process."""
    failure = Failure(FailureKind.ALLOCATOR, device=FULL_OF_TENSORS, activity=Activity.LOGITS)
    engine = EngineRecord(seen=True, kv_cache_bytes=96 * GIB)
    found = best(CollectedEvidence(failure, engine=engine, programs=("trl", "vllm")))
    assert found.failure_class is FailureClass.ENGINE_NOT_ASLEEP
    assert "vllm_enable_sleep_mode: True" in found.advice


def test_a_small_engine_awake_does_not_explain_a_full_gpu() -> None:
    failure = Failure(FailureKind.ALLOCATOR, device=FULL_OF_TENSORS, activity=Activity.LOGITS)
    engine = EngineRecord(seen=True, kv_cache_bytes=4 * GIB)
    found = best(CollectedEvidence(failure, engine=engine, programs=("trl", "vllm")))
    assert found.failure_class is FailureClass.ACTIVATION_SPIKE


def test_fragmentation_is_less_certain_if_enough_was_free() -> None:
    in_pieces = replace(FULL, cached_bytes=10 * GIB, process_bytes=52 * GIB)
    free = FULL.requested_bytes
    devices = [in_pieces] + [replace(in_pieces, free_bytes=size, total_bytes=60 * GIB) for size in (free, free + GIB)]
    found = [best(CollectedEvidence(Failure(FailureKind.ALLOCATOR, device=device))) for device in devices]
    assert [(each.failure_class, each.confidence) for each in found] == [
        (FailureClass.FRAGMENTATION, 0.85),
        (FailureClass.FRAGMENTATION, 0.6),
        (FailureClass.UNKNOWN, 0.5),
    ]


def test_before_the_engine_starts_siblings_are_no_strangers() -> None:
    sizes = {"free_bytes": 80 * GIB, "total_bytes": 140 * GIB, "wanted_bytes": 137 * GIB}
    refused = CollectedEvidence(Failure(FailureKind.ENGINE_START, sizes=sizes))
    assert best(refused).failure_class is FailureClass.FOREIGN_PROCESS
    assert best(replace(refused, siblings=("ray::WorkerDict",))).failure_class is FailureClass.KV_CACHE_OVERSIZED


def test_a_cache_of_a_hundredth_is_no_fragmentation() -> None:
    small_request = replace(FULL_OF_TENSORS, requested_bytes=GIB // 2, free_bytes=GIB // 4)
    failure = Failure(FailureKind.ALLOCATOR, device=small_request, activity=Activity.FORWARD)
    classes = {found.failure_class for found in diagnose(CollectedEvidence(failure))}
    assert FailureClass.FRAGMENTATION not in classes


def test_the_ledger_adds_up_to_the_gpu() -> None:
    evidence = CollectedEvidence(Failure(FailureKind.ALLOCATOR, device=FULL))
    assert evidence.failure is not None
    whole = [
        entry
        for entry in gpu_entries(ledger_of(evidence.failure, evidence))
        if not (entry.is_part or entry.is_expected)
    ]
    assert sum(entry.size_bytes for entry in whole) == FULL.total_bytes


def test_memory_of_a_sleeping_engine_is_no_memory_of_the_process() -> None:
    asleep = DeviceMemory(
        2 * GIB, 0, 80 * GIB, GIB, allocated_bytes=84 * GIB, cached_bytes=30 * GIB, process_bytes=77 * GIB
    )
    assert asleep.asleep_bytes == 37 * GIB
    failure = Failure(FailureKind.ALLOCATOR, device=asleep, activity=Activity.BACKWARD)
    evidence = CollectedEvidence(failure, engine=EngineRecord(seen=True, kv_cache_bytes=60 * GIB), programs=("trl",))
    assert FailureClass.ENGINE_NOT_ASLEEP not in {found.failure_class for found in diagnose(evidence)}
    assert ("an engine that sleeps, whose memory is back with the GPU", 37 * GIB) in {
        (entry.owner, entry.size_bytes) for entry in gpu_entries(ledger_of(failure, evidence))
    }
