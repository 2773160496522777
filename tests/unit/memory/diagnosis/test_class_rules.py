"""Classes of failures whose numbers are known: from a full GPU alone, and from evidence that no message contains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import CollectedEvidence, Failure, FailureKind
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import EngineRecord, MemorySeries
from rljob_memory.evidence.failure import DeviceMemory, GpuProcess
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, MIB
from rljob_memory.trend import past_growth
from rljob_testing.memory_plans import memory_plan

FULL = DeviceMemory(
    GIB,
    gpu=0,
    total_bytes=80 * GIB,
    free_bytes=100 * MIB,
    allocated_bytes=78 * GIB,
    cached_bytes=200 * MIB,
    process_bytes=79 * GIB,
)
SHARED = replace(
    FULL, requested_bytes=2 * GIB, free_bytes=GIB, allocated_bytes=40 * GIB, cached_bytes=GIB, process_bytes=42 * GIB
)
"""37 GiB of it are not the process's own."""
H200 = DeviceMemory(9 * GIB, 0, 140 * GIB, free_bytes=3 * GIB, allocated_bytes=134 * GIB, cached_bytes=3 * GIB // 2)
ASLEEP, AWAKE = memory_plan(rollout_sleep="Level2"), memory_plan(rollout_sleep="Disabled")

UNKNOWN = FailureClass.UNKNOWN
SPIKE = FailureClass.ACTIVATION_SPIKE
FRAGMENTATION = FailureClass.FRAGMENTATION
CACHE = FailureClass.ALLOCATOR_CACHE
KV_CACHE = FailureClass.KV_CACHE_OVERSIZED
NOT_ASLEEP = FailureClass.ENGINE_NOT_ASLEEP
FOREIGN = FailureClass.FOREIGN_PROCESS
CONTEXT = FailureClass.CONTROLLER_CONTEXT
RETAINED = FailureClass.RETAINED_GRAPH


def out_of(
    device: DeviceMemory,
    activity: Activity | None = None,
    *,
    role: str | None = None,
    phase: str | None = None,
    **of: Any,
) -> CollectedEvidence:
    """torch's allocator failed; `of` has further evidence."""
    failure = Failure(FailureKind.ALLOCATOR, device=device, activity=activity, role=role, phase=phase)
    return CollectedEvidence(failure, **of)


def woken(activity: Activity = Activity.WAKE, **of: Any) -> CollectedEvidence:
    """An engine could not wake up."""
    return CollectedEvidence(Failure(FailureKind.ENGINE_WAKE, activity=activity), **of)


def refused(wanted_gib: int, **of: Any) -> CollectedEvidence:
    """An engine did not start, since 80 of 140 GiB were free."""
    sizes = {"free_bytes": 80 * GIB, "total_bytes": 140 * GIB, "wanted_bytes": wanted_gib * GIB}
    return CollectedEvidence(Failure(FailureKind.ENGINE_START, sizes=sizes), **of)


def driver(**of: Any) -> CollectedEvidence:
    activity = of.pop("activity", None)
    return CollectedEvidence(Failure(FailureKind.DRIVER, "CUDA error: out of memory", activity=activity), **of)


def series(allocated: Sequence[float], reserved: Sequence[float], phase: str = "update") -> tuple[MemorySeries]:
    """A policy's memory in GiB, step by step."""
    samples = [
        MemorySample(allocated_bytes=int(a * GIB), reserved_bytes=int(r * GIB), step=step, phase=phase)
        for step, (a, r) in enumerate(zip(allocated, reserved, strict=True), start=1)
    ]
    return (MemorySeries("policy-0", tuple(samples)),)


def others(*sizes: int, first_pid: int = 7) -> tuple[GpuProcess, ...]:
    return tuple(GpuProcess(first_pid + number, size) for number, size in enumerate(sizes))


GRAPHS = replace(FULL, private_pool_bytes=300 * MIB)
SLEEPING = replace(FULL, requested_bytes=2 * GIB, allocated_bytes=83 * GIB, cached_bytes=30 * GIB)
"""torch counts 34 GiB that an engine of the process has given back."""
ROOMY = replace(FULL, requested_bytes=200 * MIB, allocated_bytes=8 * GIB, cached_bytes=2 * GIB)
COPY = replace(FULL, requested_bytes=50 * GIB, allocated_bytes=50 * GIB, free_bytes=29 * GIB, process_bytes=51 * GIB)
PARTLY_CACHED = replace(
    FULL, requested_bytes=4 * GIB, allocated_bytes=64 * GIB, cached_bytes=6 * GIB, process_bytes=71 * GIB
)
SMALL_CACHE = replace(
    FULL,
    requested_bytes=448 * MIB,
    free_bytes=364 * MIB,
    allocated_bytes=72 * GIB,
    cached_bytes=4 * GIB,
    process_bytes=77 * GIB,
)
BESIDE_CONTEXTS = replace(FULL, requested_bytes=400 * MIB, process_bytes=78 * GIB)
ONE_CONTEXT = replace(FULL, others=others(400 * MIB))
LAST_OF_RANKS = replace(FULL, allocated_bytes=200 * MIB, cached_bytes=20 * MIB, process_bytes=700 * MIB)
IN_PIECES = replace(SHARED, cached_bytes=10 * GIB, process_bytes=52 * GIB)
AFTER_A_SLEEP = replace(SHARED, allocated_bytes=84 * GIB, cached_bytes=30 * GIB, process_bytes=77 * GIB)
ONE_SMALL_PROCESS = DeviceMemory(64 * MIB, 0, 80 * GIB, 0, 70 * GIB, GIB, others=others(910 * MIB))
BACKWARD, LOGITS = Activity.BACKWARD, Activity.LOGITS


def ranks(*pids: int) -> DeviceMemory:
    sizes = (77 * GIB, 600 * MIB, 620 * MIB)
    return replace(LAST_OF_RANKS, others=tuple(map(GpuProcess, pids, sizes)))


CASES: list[tuple[str, CollectedEvidence, str]] = [
    # a remark, the evidence, and the first class: with (+) and without (-) others, or as the only one
    ("neither a stack nor a role", out_of(FULL), "Unknown only"),
    ("a policy", out_of(FULL, role="policy"), "ActivationSpike"),
    ("CUDA graphs show an engine", out_of(GRAPHS), "KVCacheOversized"),
    ("CUDA graphs of a policy", out_of(GRAPHS, role="policy"), "ActivationSpike -KVCacheOversized"),
    ("CUDA graphs in a backward pass", out_of(GRAPHS, BACKWARD), "ActivationSpike -KVCacheOversized"),
    ("a sync without a traceback", out_of(FULL, role="policy", phase="sync"), "WeightSyncSpike"),
    ("an update without a traceback", out_of(FULL, role="policy", phase="update"), "ActivationSpike"),
    # pieces of torch's cache
    ("a cache that may be a sleeping engine", out_of(SLEEPING, BACKWARD), "ActivationSpike -Fragmentation"),
    ("a cache", out_of(replace(SLEEPING, allocated_bytes=48 * GIB)), "Fragmentation"),
    ("a cache of ten requests", out_of(ROOMY), "Fragmentation"),
    (
        "a cache beside plenty of free memory",
        out_of(replace(ROOMY, free_bytes=60 * GIB, process_bytes=19 * GIB)),
        "Unknown -Fragmentation",
    ),
    ("a cache as large as the request, and a remainder", out_of(PARTLY_CACHED), "Fragmentation +ForeignProcess"),
    ("a smaller cache", out_of(replace(PARTLY_CACHED, requested_bytes=7 * GIB)), "ForeignProcess"),
    ("a listed process", out_of(replace(PARTLY_CACHED, others=others(8 * GIB))), "ForeignProcess"),
    ("a small cache of nine requests", out_of(SMALL_CACHE), "Fragmentation"),
    ("a small cache of four", out_of(replace(SMALL_CACHE, requested_bytes=GIB)), "Unknown -Fragmentation"),
    (
        "a cache of a hundredth",
        out_of(replace(H200, requested_bytes=GIB // 2, free_bytes=GIB // 4), Activity.FORWARD),
        "ActivationSpike -Fragmentation",
    ),
    # a second copy of the model
    ("a request as large as all tensors", out_of(COPY), "ModelWeights"),
    ("such a request in a backward pass", out_of(COPY, BACKWARD), "ActivationSpike"),
    ("a slightly smaller request", out_of(replace(COPY, requested_bytes=49 * GIB)), "ActivationSpike"),
    (
        "a copy of a small model",
        out_of(replace(COPY, requested_bytes=GIB, allocated_bytes=GIB, free_bytes=100 * MIB)),
        "ForeignProcess -ModelWeights",
    ),
    # contexts of one program have one size
    (
        "two processes of a context's size",
        out_of(replace(BESIDE_CONTEXTS, others=others(520 * MIB, 516 * MIB)), Activity.GATHERING),
        "ControllerContext",
    ),
    (
        "two processes of different sizes",
        out_of(replace(BESIDE_CONTEXTS, others=others(384 * MIB, 716 * MIB)), Activity.GATHERING),
        "WeightSyncSpike +ControllerContext",
    ),
    (
        "a single process",
        out_of(replace(BESIDE_CONTEXTS, others=others(600 * MIB)), Activity.GATHERING),
        "WeightSyncSpike +ControllerContext",
    ),
    ("a single context, and a large request", out_of(ONE_CONTEXT), "Unknown only"),
    ("and a small request", out_of(replace(ONE_CONTEXT, requested_bytes=300 * MIB)), "ControllerContext"),
    (
        "contexts hold no cache",
        out_of(
            replace(FULL, allocated_bytes=70 * GIB, process_bytes=74 * GIB, others=others(*[GIB] * 5)),
            Activity.GENERATION,
        ),
        "ControllerContext -AllocatorCache",
    ),
    # processes that started together are ranks
    ("ranks", out_of(ranks(501, 502, 504)), "ControllerContext +ForeignProcess"),
    ("two programs", out_of(ranks(501, 504, 507)), "ForeignProcess +ControllerContext"),
    ("a later process", out_of(ranks(501, 502, 9000)), "ForeignProcess +ControllerContext"),
    # an engine, or another process
    ("other memory without an engine", out_of(SHARED), "ForeignProcess"),
    (
        "an engine that never slept",
        out_of(SHARED, BACKWARD, engine=EngineRecord(seen=True)),
        "EngineNotAsleep +ForeignProcess",
    ),
    ("a plan whose engine stays awake", out_of(SHARED, role="policy", phase="update", plan=AWAKE), "EngineNotAsleep"),
    ("a plan whose engine sleeps", out_of(SHARED, role="policy", phase="update", plan=ASLEEP), "ForeignProcess"),
    (
        "a plan whose engine sleeps, at the start",
        out_of(SHARED, role="policy", phase="load", plan=ASLEEP),
        "ForeignProcess",
    ),
    ("a small process", out_of(ONE_SMALL_PROCESS, role="policy", phase="update"), "ActivationSpike +ControllerContext"),
    (
        "a small process that is the sleeping engine",
        out_of(ONE_SMALL_PROCESS, role="policy", phase="update", plan=ASLEEP),
        "ActivationSpike -ControllerContext",
    ),
    (
        "a small engine awake in the failing process",
        out_of(H200, LOGITS, engine=EngineRecord(seen=True, kv_cache_bytes=4 * GIB), programs=("trl", "vllm")),
        "ActivationSpike",
    ),
    (
        "an engine whose memory is back with the GPU",
        out_of(AFTER_A_SLEEP, BACKWARD, engine=EngineRecord(seen=True, kv_cache_bytes=60 * GIB), programs=("trl",)),
        "ActivationSpike -EngineNotAsleep",
    ),
    ("an engine that starts beside another process", refused(126), "ForeignProcess"),
    ("an engine that starts beside the job's policy", refused(126, series=series([56], [57])), "KVCacheOversized"),
    ("an engine that starts beside siblings", refused(137, siblings=("ray::WorkerDict",)), "KVCacheOversized"),
    ("a wake-up beside an empty cache", woken(series=series([10], [10.1])), "KVCacheOversized"),
    # growth
    ("tensors that grow", out_of(SHARED, BACKWARD, series=series(range(10, 20), [30] * 10)), "RetainedGraph"),
    ("pinned memory, in the words of the GPU", driver(activity=Activity.PINNING), "HostMemory"),
]


@pytest.mark.parametrize(("evidence", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_numbers_decide_the_class(evidence: CollectedEvidence, expected: str) -> None:
    found = [str(each.failure_class) for each in diagnose(evidence)]
    first, *others = expected.split()
    assert found[0] == first
    assert {name[1:] for name in others if name[0] == "+"} <= set(found)
    assert not {name[1:] for name in others if name[0] == "-"} & set(found)
    assert "only" not in others or found == [first]


@pytest.mark.parametrize(
    ("evidence", "first", "confidence", "numbers"),
    [
        (woken(series=series([10], [30])), CACHE, 0.85, {"policy_cache_bytes": 20 * GIB}),
        (woken(series=series([10] * 10, range(30, 40))), CACHE, None, {"reserved_last_bytes": 39 * GIB}),
        (woken(Activity.KV_CACHE), KV_CACHE, 0.75, {}),
        (
            out_of(
                SHARED,
                BACKWARD,
                engine=EngineRecord(seen=True, asleep=True, freed_bytes=0, still_in_use_bytes=63 * GIB),
            ),
            NOT_ASLEEP,
            0.9,
            {},
        ),
        (
            driver(gpu_processes={0: (GpuProcess(1, 26_167 * MIB), *others(*[871 * MIB] * 7))}),
            CONTEXT,
            None,
            {"context_processes": 7},
        ),
        # fragmentation is less certain if enough was free
        (out_of(IN_PIECES), FRAGMENTATION, 0.85, {}),
        (out_of(replace(IN_PIECES, free_bytes=2 * GIB, total_bytes=60 * GIB)), FRAGMENTATION, 0.6, {}),
        (out_of(replace(IN_PIECES, free_bytes=3 * GIB, total_bytes=60 * GIB)), UNKNOWN, 0.5, {}),
    ],
)
def test_a_diagnosis_has_its_confidence_and_numbers(
    evidence: CollectedEvidence, first: FailureClass, confidence: float | None, numbers: dict[str, int]
) -> None:
    best = diagnose(evidence)[0]
    assert best.failure_class is first
    assert confidence in (None, best.confidence)
    assert best.numbers | numbers == best.numbers


def test_an_engine_awake_in_the_failing_process_is_named_with_its_option() -> None:
    """TRL, colocated: torch counts the KV cache of the engine among the tensors of the process."""
    engine = EngineRecord(seen=True, kv_cache_bytes=96 * GIB)
    best = diagnose(out_of(H200, LOGITS, engine=engine, programs=("trl", "vllm")))[0]
    assert best.failure_class is NOT_ASLEEP
    assert "vllm_enable_sleep_mode: True" in best.advice


def test_a_pass_on_a_gpu_full_of_retained_graphs_is_not_the_cause() -> None:
    growing = out_of(SHARED, LOGITS, series=series(range(10, 50, 4), [60] * 10))
    found = {each.failure_class: each.confidence for each in diagnose(growing)}
    assert next(iter(found)) is RETAINED
    assert found[SPIKE] <= 0.5


def test_nothing_is_diagnosed_without_a_failure() -> None:
    assert diagnose(CollectedEvidence(series=series([1] * 9, [2] * 9))) == []


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


@pytest.mark.parametrize(
    ("total_gib", "policy", "foreign_gib"),
    [(140, series([16], [17]), 101), (40, series([16], [17]), None), (40, (), 18)],
)
def test_the_policy_of_the_job_is_no_foreign_process(
    total_gib: int, policy: tuple[MemorySeries, ...], foreign_gib: int | None
) -> None:
    """What is left beside it may be the driver's."""
    device = DeviceMemory(GIB, total_bytes=total_gib * GIB, free_bytes=GIB, process_bytes=21 * GIB)
    found = {
        each.failure_class: each
        for each in diagnose(out_of(device, role="rollout", phase="sync", series=policy, plan=ASLEEP))
    }
    assert (FOREIGN in found) == (foreign_gib is not None)
    if foreign_gib is not None:
        assert found[FOREIGN].numbers["other_processes_bytes"] == foreign_gib * GIB
        assert ("besides 17.00 GiB of the policy" in found[FOREIGN].message) == bool(policy)
