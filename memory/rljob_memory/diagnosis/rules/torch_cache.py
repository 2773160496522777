"""Rules for torch's caching allocator: fragmentation, unused cache, tensors that are never freed."""

from __future__ import annotations

import re

from rljob_api.memory_failure import Activity
from rljob_memory.diagnosis.classes import Diagnosis, FailureClass
from rljob_memory.diagnosis.growth import PastGrowth, cache_growth, large_growth
from rljob_memory.diagnosis.ledger import ORDINARY_CACHE_SHARE, Ledger
from rljob_memory.diagnosis.rules.other_processes import context_sized
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.figures import Measure
from rljob_memory.sizes import GIB, MIB, human_bytes
from rljob_memory.trend import Trend

# torch's cache is large enough for the request, but no piece of it is.
#
# Before the allocator gives up it returns every cached block that is whole (CUDACachingAllocator.cpp,
# `release_cached_blocks`). The rest cannot be returned: the free parts of segments that also hold tensors. So a cache
# at least as large as the request is fragmentation by definition; whether it is the cause, or only a side effect on a
# full card, depends on its share.

_LARGE_CACHE_SHARE = 0.1
"""Share of reserved memory. Ordinary jobs leave 1–5 % unallocated at the end; the jobs in public threads that
expandable segments cured had 11–45 %."""
_LEAST_SHARE_OF_THE_GPU = 0.02
"""A smaller cache is a side effect on a GPU that something else has filled."""
_LEAST_SHARE = 0.03
"""A smaller share is what any allocator leaves between tensors, however small the request that failed."""
_MANY_TIMES = 8
"""Least multiple of the request that the pieces of a small cache have together, if each of them is too small."""
_ENOUGH = 0.99
"""Sizes are printed with two decimals."""
_CLEARLY_ENOUGH = 2.0
_PART_OF_THE_REQUEST = 0.5
"""If the message does not have the free memory, which may have been the rest."""
_WORTH_MENTIONING_BYTES = 512 * MIB
_AFTER_GROWTH = 0.6
"""Reserved memory has grown beside tensors that have not."""
_MOST_WITH_ENOUGH_FREE = 0.6
"""The driver had room for the request when the message was written: another process took and returned it."""


def fragmentation(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    device = failure.device
    sizes = failure.sizes
    if (
        sizes.get("piece_bytes", 0) < sizes.get("wanted_bytes", 0) <= sizes.get("free_bytes", 0)
        and "piece_bytes" in sizes
    ):
        return Diagnosis(
            FailureClass.FRAGMENTATION,
            0.7,
            f"{human_bytes(sizes['wanted_bytes'])} did not fit although {human_bytes(sizes['free_bytes'])} were free, "
            f"of which {human_bytes(sizes['piece_bytes'])} in one piece",
        )
    if failure.kind is FailureKind.FRAGMENTED:
        return Diagnosis(
            FailureClass.FRAGMENTATION, 0.7, "The allocator reports that no piece of its free memory is large enough"
        )
    if device is None or not device.cached_bytes or not device.reserved_bytes:
        return _by_its_growth(failure, evidence)
    requested, free = device.requested_bytes, device.free_bytes or 0
    if device.had_room or (device.allowed_bytes is None and device.had_enough_free):
        return None
    cached = device.own_cache_bytes
    share = cached / (device.reserved_bytes - device.asleep_bytes) if cached else 0.0
    growth = cache_growth(evidence.series)
    if share < _LEAST_SHARE or cached < _LEAST_SHARE_OF_THE_GPU * (device.total_bytes or 0):
        return None
    least_cached = requested if share >= ORDINARY_CACHE_SHARE else max(requested * _MANY_TIMES, _WORTH_MENTIONING_BYTES)
    largest = device.largest_cached_block_bytes
    if largest is not None and largest < requested <= cached and share >= _LARGE_CACHE_SHARE:
        confidence = 0.9
    elif cached >= _ENOUGH * requested and share >= _LARGE_CACHE_SHARE:
        confidence = 0.85
    elif cached >= _CLEARLY_ENOUGH * requested and cached >= _WORTH_MENTIONING_BYTES and share >= ORDINARY_CACHE_SHARE:
        confidence = 0.6
    elif device.free_bytes is None and share >= _LARGE_CACHE_SHARE and cached >= _PART_OF_THE_REQUEST * requested:
        confidence = 0.35
    elif free < requested and (cached >= least_cached or (share >= _LARGE_CACHE_SHARE and cached + free >= requested)):
        confidence = 0.4
    elif growth and share >= ORDINARY_CACHE_SHARE:
        confidence = _AFTER_GROWTH
    else:
        return None
    if growth:
        confidence = max(confidence, _AFTER_GROWTH)
    if free >= requested:
        confidence = min(confidence, _MOST_WITH_ENOUGH_FREE)
    grown = f"; reserved memory grew by {human_bytes(growth.trend.growth_bytes)}, tensors did not" if growth else ""
    pieces = f", the largest piece {human_bytes(largest)}" if largest is not None else ""
    return Diagnosis(
        FailureClass.FRAGMENTATION,
        confidence,
        f"torch asked for {human_bytes(requested)} while {human_bytes(cached)} of its reserved memory ({share:.0%}) "
        f"was unused, in pieces too small for the request{pieces}{grown}",
    )


def _by_its_growth(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    """Of a message without numbers: the log shows reserved memory that grew beside tensors that did not."""
    growth = cache_growth(evidence.series)
    if growth is None or failure.kind is not FailureKind.ALLOCATOR or failure.in_engine:
        return None
    first, last = human_bytes(growth.trend.first_bytes), human_bytes(growth.trend.last_bytes)
    return Diagnosis(
        FailureClass.FRAGMENTATION,
        _AFTER_GROWTH,
        f"Memory reserved by torch grew from {first} to {last} over {growth.trend.values} samples while its tensors "
        "did not grow",
    )


# torch's cache in one process holds memory that another process asks the driver for.
#
# torch empties its cache before it raises, so in the failing process the cache is never the cause. But vLLM's wake-up
# (cuMemCreate), NCCL and cuBLAS ask the driver directly, and nothing empties torch's cache for them: they fail, and the
# policy holds the memory (Trinity-RFT 541, verl 575 and 6912, slime 669).

_BY_TEXT = {
    FailureKind.ENGINE_WAKE: 0.6,
    FailureKind.NCCL: 0.5,
    FailureKind.MATH_LIBRARY: 0.4,
}
"""Confidence from the message alone. cuBLAS also fails to allocate if indices are out of range, or versions clash."""
_LARGE_CACHE_BYTES = GIB
_LARGE_ENGINE_SHARE = 0.75
"""Share of the GPU with which an engine leaves a trainer too little, whatever torch's cache holds."""
_BESIDE_A_LARGE_SHARE = 0.45
_ALONE = 0.25
"""The log names nothing that could hold a cache: the GPU may be full of anything."""


def allocator_cache(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    kind = failure.kind
    if kind is FailureKind.ALLOCATOR:
        in_engine = failure.in_engine and failure.activity is not Activity.MODEL_LOAD
        generates = in_engine or failure.activity in (Activity.GENERATION, Activity.SAMPLING)
        if not generates or ledger.foreign_bytes() - _contexts_bytes(failure) < _LARGE_CACHE_BYTES:
            return None
        by_text = 0.45
    elif kind in _BY_TEXT:
        by_text = _BY_TEXT[kind]
        if failure.activity is Activity.KV_CACHE or evidence.shows_an_engines_start:
            by_text = 0.4  # It was allocating its memory, not mapping it again.
        elif kind is FailureKind.ENGINE_WAKE and takes_most_of_the_gpu(evidence):
            by_text = _BESIDE_A_LARGE_SHARE
        if "NOT_INITIALIZED" in failure.text:
            by_text = 0.3
        if not _shows_a_holder(failure, evidence):
            by_text = _ALONE
    else:
        return None
    cache = ledger.policy_cache_bytes
    if rising := _rising_cache(failure, evidence):
        return rising
    if cache is None:
        return Diagnosis(
            FailureClass.ALLOCATOR_CACHE,
            by_text,
            f"{_capitalized(kind)}; torch's cache is not available to allocations outside of torch",
        )
    if cache < _LARGE_CACHE_BYTES:
        return None
    return Diagnosis(
        FailureClass.ALLOCATOR_CACHE,
        0.85,
        f"{_capitalized(kind)} while the policy's torch held {human_bytes(cache)} of unused cache",
        {"policy_cache_bytes": cache},
    )


def takes_most_of_the_gpu(evidence: CollectedEvidence) -> bool:
    """True if the engine's configured share leaves a trainer too little, by itself."""
    return (evidence.engine_share or 0.0) >= _LARGE_ENGINE_SHARE


def _shows_a_holder(failure: Failure, evidence: CollectedEvidence) -> bool:
    """True if the log shows a process with a cache: an engine that woke, a torch program in whose error NCCL failed."""
    if evidence.programs or evidence.engine.seen or evidence.series or evidence.siblings:
        return True
    is_in_torchs_error = failure.kind is FailureKind.NCCL and "NCCL WARN" not in failure.text
    return failure.kind is FailureKind.ENGINE_WAKE or is_in_torchs_error


def _contexts_bytes(failure: Failure) -> int:
    """Memory of other processes that is no cache: they are as small as a CUDA context."""
    return sum(process.used_bytes for process in context_sized(failure.device)) if failure.device else 0


def _rising_cache(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    """Reserved memory grows step by step, and memory in tensors does not."""
    found = cache_growth(evidence.series)
    if found is None:
        return None
    first, last = found.trend.first_bytes, found.trend.last_bytes
    return Diagnosis(
        FailureClass.ALLOCATOR_CACHE,
        0.85,
        f"Memory reserved by the policy's torch grew from {human_bytes(first)} to {human_bytes(last)} while "
        f"its tensors did not grow; {_capitalized(failure.kind)}",
        {"reserved_first_bytes": first, "reserved_last_bytes": last},
    )


def _capitalized(kind: FailureKind) -> str:
    return f"{kind.meaning[0].upper()}{kind.meaning[1:]}"


# Memory in tensors grows with every micro-batch or step.
#
# No message can show this: at the end the card is merely full. It takes samples. Activations come and go within a
# micro-batch, the optimizer's state steps up once; only tensors that are kept, on purpose or by mistake, grow steadily
# (Fast-LLM 486: 164 MiB a micro-batch; verl 6699: 278 MiB).

_OF_THE_GPU = frozenset(
    {FailureKind.ALLOCATOR, FailureKind.DRIVER, FailureKind.NCCL, FailureKind.MATH_LIBRARY, FailureKind.ENGINE_WAKE}
)

_LARGE_GROWTH_SHARE = 0.3
_CONFIDENCES = {Measure.TENSORS: (0.88, 0.75), Measure.GPU: (0.78, 0.65), Measure.RESERVED: (0.55, 0.45)}
"""Of a growth without a pause that is a large part of what was held, and of another one."""
_FEW_VALUES, _OF_FEW_VALUES = 8, 0.6
_TITLES = {
    Measure.TENSORS: "Memory in tensors",
    Measure.GPU: "GPU memory",
    Measure.RESERVED: "Memory reserved by torch",
}
_GROWS_IN_HEALTH = re.compile(r"load|init|creat|build|shard|layer|warm|max|peak", re.IGNORECASE)
"""In the words before a figure: memory that grows while a model is made, or a peak, which never falls."""


def retained_graph(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    if failure.kind not in _OF_THE_GPU | {FailureKind.NO_MESSAGE} and not failure.is_of_the_gpu:
        return None
    if not ledger.growths:
        return _collected(failure)
    growth, series = max(
        ledger.growths, key=lambda pair: (pair[1].measure is Measure.TENSORS, pair[0].trend.growth_bytes)
    )
    trend = growth.trend
    return Diagnosis(
        FailureClass.RETAINED_GRAPH,
        _confidence(growth, series.measure),
        f"{_TITLES[series.measure]} of {series.name} grew from {human_bytes(trend.first_bytes)} to "
        f"{human_bytes(trend.last_bytes)} over {trend.values} samples, "
        f"{human_bytes(trend.mean_growth_bytes)} per {growth.unit}",
        {
            "allocated_first_bytes": trend.first_bytes,
            "allocated_last_bytes": trend.last_bytes,
            "growth_a_sample_bytes": trend.mean_growth_bytes,
            "samples": trend.values,
        },
    )


def _confidence(growth: PastGrowth, measure: Measure) -> float:
    if growth.unit == "micro-batch":
        return 0.88
    firm, ordinary = _CONFIDENCES[measure]
    if growth.trend.values < _FEW_VALUES:
        return min(ordinary, _OF_FEW_VALUES)
    return firm if _fills_the_gpu(growth.trend) else ordinary


def growth_alone(evidence: CollectedEvidence) -> Diagnosis | None:
    """Memory in tensors that has grown a lot, in a log without a failure: people post it before or instead of one."""
    policies = [series for series in evidence.series if series.is_policy and not _GROWS_IN_HEALTH.search(series.name)]
    growths = [(growth, series) for series in policies if (growth := large_growth(series))]
    if not growths:
        return None
    (first, last), series = max(growths, key=lambda pair: pair[0][1] - pair[0][0])
    return Diagnosis(
        FailureClass.RETAINED_GRAPH,
        0.5,
        f"The log shows no failure, but {_lower(_TITLES[series.measure])} of {series.name} grew from "
        f"{human_bytes(first)} to {human_bytes(last)} over {len(series.samples)} samples.",
        {"allocated_first_bytes": first, "allocated_last_bytes": last, "samples": len(series.samples), "failures": 0},
    )


def _lower(title: str) -> str:
    return title if title.startswith("GPU") else f"{title[0].lower()}{title[1:]}"


def _collected(failure: Failure) -> Diagnosis | None:
    """Results of an evaluation that are kept on the GPU until its end: the stack shows it, in one step."""
    if failure.activity is not Activity.COLLECTING:
        return None
    more = f"; {human_bytes(failure.requested_bytes)} more did not fit" if failure.requested_bytes else ""
    return Diagnosis(FailureClass.RETAINED_GRAPH, 0.55, f"Results of all batches are collected on the GPU{more}")


def _fills_the_gpu(trend: Trend) -> bool:
    """True if the memory grew without a pause, and its growth is a large part of what was held at the end."""
    return trend.is_firm and trend.growth_bytes >= _LARGE_GROWTH_SHARE * trend.last_bytes
