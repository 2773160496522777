"""Diagnoses from the numbers of a full GPU alone: neither a stack nor a program is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import CollectedEvidence, Failure, FailureKind
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.failure import DeviceMemory, GpuProcess
from rljob_memory.sizes import GIB, MIB

FULL = DeviceMemory(
    GIB,
    gpu=0,
    total_bytes=80 * GIB,
    free_bytes=100 * MIB,
    allocated_bytes=78 * GIB,
    cached_bytes=200 * MIB,
    process_bytes=79 * GIB,
)


def classes(device: DeviceMemory, activity: Activity | None = None, role: str | None = None) -> list[FailureClass]:
    failure = Failure(FailureKind.ALLOCATOR, device=device, activity=activity, role=role)
    return [diagnosis.failure_class for diagnosis in diagnose(CollectedEvidence(failure))]


def test_a_full_gpu_without_a_stack_is_unknown() -> None:
    assert classes(FULL) == [FailureClass.UNKNOWN]


def test_a_full_policy_is_an_activation_spike() -> None:
    assert classes(FULL, role="policy")[0] is FailureClass.ACTIVATION_SPIKE


def test_cuda_graphs_show_an_engine() -> None:
    graphs = replace(FULL, private_pool_bytes=300 * MIB)
    assert classes(graphs)[0] is FailureClass.KV_CACHE_OVERSIZED
    assert FailureClass.KV_CACHE_OVERSIZED not in classes(graphs, role="policy")
    assert FailureClass.KV_CACHE_OVERSIZED not in classes(graphs, Activity.BACKWARD)


def test_a_cache_that_may_be_a_sleeping_engine_is_no_fragmentation() -> None:
    cached = replace(FULL, requested_bytes=2 * GIB, allocated_bytes=83 * GIB, cached_bytes=30 * GIB)
    assert cached.asleep_bytes == 34 * GIB
    assert FailureClass.FRAGMENTATION not in classes(cached, Activity.BACKWARD)
    assert classes(replace(cached, cached_bytes=30 * GIB, allocated_bytes=48 * GIB))[0] is FailureClass.FRAGMENTATION


def test_a_refusal_with_plenty_of_free_memory_is_no_fragmentation() -> None:
    cached = replace(FULL, requested_bytes=200 * MIB, allocated_bytes=8 * GIB, cached_bytes=2 * GIB)
    assert classes(cached)[0] is FailureClass.FRAGMENTATION
    free = replace(cached, free_bytes=60 * GIB, process_bytes=19 * GIB)
    assert classes(free) == [FailureClass.UNKNOWN]


@pytest.mark.parametrize(
    ("held", "first"),
    [
        ((520 * MIB, 516 * MIB), FailureClass.CONTROLLER_CONTEXT),
        ((384 * MIB, 716 * MIB), FailureClass.WEIGHT_SYNC_SPIKE),
        ((600 * MIB,), FailureClass.WEIGHT_SYNC_SPIKE),
    ],
)
def test_contexts_of_one_program_have_one_size(held: tuple[int, ...], first: FailureClass) -> None:
    others = tuple(GpuProcess(pid, size) for pid, size in enumerate(held))
    beside = replace(FULL, requested_bytes=400 * MIB, process_bytes=78 * GIB, others=others)
    found = classes(beside, Activity.GATHERING)
    assert found[0] is first
    assert FailureClass.CONTROLLER_CONTEXT in found


def test_a_single_context_on_a_large_gpu_explains_nothing() -> None:
    beside = replace(FULL, others=(GpuProcess(7, 400 * MIB),))
    assert classes(beside) == [FailureClass.UNKNOWN]
    assert FailureClass.CONTROLLER_CONTEXT in classes(replace(beside, requested_bytes=300 * MIB))


@pytest.mark.parametrize(
    ("pids", "first"),
    [
        ((501, 502, 504), FailureClass.CONTROLLER_CONTEXT),
        ((501, 502, 503), FailureClass.CONTROLLER_CONTEXT),
        ((501, 504, 507), FailureClass.FOREIGN_PROCESS),
        ((501, 502, 9000), FailureClass.FOREIGN_PROCESS),
    ],
)
def test_processes_that_started_together_are_ranks(pids: tuple[int, ...], first: FailureClass) -> None:
    sizes = (77 * GIB, 600 * MIB, 620 * MIB)
    others = tuple(GpuProcess(pid, size) for pid, size in zip(pids, sizes, strict=True))
    device = replace(FULL, allocated_bytes=200 * MIB, cached_bytes=20 * MIB, process_bytes=700 * MIB, others=others)
    found = classes(device)
    assert found[0] is first
    assert {FailureClass.CONTROLLER_CONTEXT, FailureClass.FOREIGN_PROCESS} <= set(found)


def test_a_request_as_large_as_all_tensors_is_a_second_copy() -> None:
    copy = replace(
        FULL, requested_bytes=50 * GIB, allocated_bytes=50 * GIB, free_bytes=29 * GIB, process_bytes=51 * GIB
    )
    assert classes(copy)[0] is FailureClass.MODEL_WEIGHTS
    assert classes(copy, Activity.BACKWARD)[0] is FailureClass.ACTIVATION_SPIKE
    assert classes(replace(copy, requested_bytes=49 * GIB))[0] is FailureClass.ACTIVATION_SPIKE
    small = replace(copy, requested_bytes=GIB, allocated_bytes=GIB, free_bytes=100 * MIB)
    assert FailureClass.MODEL_WEIGHTS not in classes(small)


def test_a_cache_as_large_as_the_request_counts_more_than_a_remainder() -> None:
    cached = replace(
        FULL, requested_bytes=4 * GIB, allocated_bytes=64 * GIB, cached_bytes=6 * GIB, process_bytes=71 * GIB
    )
    assert classes(cached)[:2] == [FailureClass.FRAGMENTATION, FailureClass.FOREIGN_PROCESS]
    assert classes(replace(cached, requested_bytes=7 * GIB))[0] is FailureClass.FOREIGN_PROCESS
    listed = replace(cached, others=(GpuProcess(7, 8 * GIB),))
    assert classes(listed)[0] is FailureClass.FOREIGN_PROCESS


def test_processes_of_the_size_of_a_context_hold_no_cache() -> None:
    others = tuple(GpuProcess(pid, GIB) for pid in range(5))
    beside = replace(FULL, allocated_bytes=70 * GIB, process_bytes=74 * GIB, others=others)
    assert FailureClass.ALLOCATOR_CACHE not in classes(beside, Activity.GENERATION)


def test_a_small_cache_counts_if_it_is_many_times_the_request() -> None:
    cached = replace(
        FULL,
        requested_bytes=448 * MIB,
        free_bytes=364 * MIB,
        allocated_bytes=72 * GIB,
        cached_bytes=4 * GIB,
        process_bytes=77 * GIB,
    )
    assert classes(cached)[0] is FailureClass.FRAGMENTATION
    assert FailureClass.FRAGMENTATION not in classes(replace(cached, requested_bytes=GIB))
