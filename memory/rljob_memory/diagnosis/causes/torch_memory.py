"""Causes in torch's memory: pieces, cache, tensors that are kept."""

from __future__ import annotations

import re

from rljob_api.memory_failure import Activity, FailureKind
from rljob_memory.diagnosis.balance import LARGE_ENGINE_SHARE, ORDINARY_CACHE_SHARE, Balance
from rljob_memory.diagnosis.causes.finding import Finding, Weight
from rljob_memory.diagnosis.growth import PastGrowth, cache_growth, large_growth
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.figures import Measure
from rljob_memory.sizes import GIB, MIB, human_bytes

_LARGE_CACHE_SHARE = 0.1
"""Share of reserved memory. Ordinary jobs leave 1–5 % unallocated at the end; the jobs in public threads that
expandable segments cured had 11–45 %."""
_LEAST_CACHE_SHARE = 0.03
_LEAST_SHARE_OF_THE_GPU = 0.02
"""A smaller cache is what any allocator leaves, or a side effect on a GPU that something else has filled."""
_MANY_TIMES = 8
"""A cache of small pieces counts if its size is at least this multiple of the request."""
_ENOUGH = 0.99
"""Share of the request from which a cache is large enough: sizes in messages have only two decimals."""
_WORTH_MENTIONING_BYTES = 512 * MIB


def fragmentation(balance: Balance) -> Finding | None:
    """torch's cache is large enough for the request, but no piece of it is.

    Before the allocator gives up it returns every cached block that is whole (CUDACachingAllocator.cpp,
    `release_cached_blocks`). The rest are free parts of segments that also hold tensors.
    """
    failure, device, growth = balance.failure, balance.device, cache_growth(balance.evidence.series)
    sizes = failure.sizes
    in_pieces = "piece_bytes" in sizes and sizes["piece_bytes"] < sizes["wanted_bytes"] <= sizes["free_bytes"]
    if failure.kind is FailureKind.FRAGMENTED or in_pieces:
        return Finding(Weight.LIKELY, "The allocator reports that no piece of its free memory is large enough")
    if device is None or not device.cached_bytes or not device.reserved_bytes:
        if growth is None or failure.kind is not FailureKind.ALLOCATOR or failure.in_engine:
            return None
        return Finding(Weight.LIKELY, f"{_grown('Memory reserved by torch', growth)} while its tensors did not grow")
    requested, free, cached = device.requested_bytes, device.free_bytes or 0, device.own_cache_bytes
    if device.had_room or (device.allowed_bytes is None and device.had_enough_free):
        return None
    share = cached / (device.reserved_bytes - device.asleep_bytes) if cached else 0.0
    if share < _LEAST_CACHE_SHARE or cached < _LEAST_SHARE_OF_THE_GPU * balance.total_bytes:
        return None
    is_large = share >= _LARGE_CACHE_SHARE
    least = requested if share >= ORDINARY_CACHE_SHARE else max(requested * _MANY_TIMES, _WORTH_MENTIONING_BYTES)
    if is_large and cached >= _ENOUGH * requested:
        weight = Weight.CERTAIN
    elif cached >= max(2 * requested, _WORTH_MENTIONING_BYTES) and share >= ORDINARY_CACHE_SHARE:
        weight = Weight.LIKELY
    elif free < requested and (cached >= least or (is_large and cached + max(free, cached) >= requested)):
        weight = Weight.FAINT
    elif growth and share >= ORDINARY_CACHE_SHARE:
        weight = Weight.LIKELY
    else:
        return None
    if growth:
        weight = max(weight, Weight.LIKELY)
    if free >= requested:
        weight = min(weight, Weight.LIKELY)
    if balance.others_outweigh_the_cache:
        weight = Weight.FAINT
    largest = device.largest_cached_block_bytes
    grown = f"; reserved memory grew by {human_bytes(growth.trend.growth_bytes)}, tensors did not" if growth else ""
    pieces = f", the largest piece {human_bytes(largest)}" if largest is not None else ""
    return Finding(
        weight,
        f"torch asked for {human_bytes(requested)} while {human_bytes(cached)} of its reserved memory ({share:.0%}) "
        f"was unused, in pieces too small for the request{pieces}{grown}",
        cached,
    )


_DRIVER_REQUESTS = {
    FailureKind.ENGINE_WAKE: Weight.LIKELY,
    FailureKind.NCCL: Weight.POSSIBLE,
    FailureKind.MATH_LIBRARY: Weight.FAINT,
}
"""Requests that go to the driver, for which nothing empties torch's cache. cuBLAS also fails if indices are out of
range, or versions do not match."""


def allocator_cache(balance: Balance) -> Finding | None:
    """torch's cache in one process holds memory that another process asks the driver for.

    torch empties its cache before it raises, so in the failing process the cache is never the cause. But vLLM's wake-up
    (cuMemCreate), NCCL and cuBLAS ask the driver directly (Trinity-RFT 541, verl 575 and 6912, slime 669).
    """
    failure, evidence = balance.failure, balance.evidence
    if failure.kind is FailureKind.ALLOCATOR:
        in_engine = failure.in_engine and failure.activity is not Activity.MODEL_LOAD
        generates = in_engine or failure.activity in (Activity.GENERATION, Activity.SAMPLING)
        if not generates or balance.foreign_bytes() - balance.contexts_bytes < GIB:
            return None
        has_a_policy = evidence.shows_a_trainer or evidence.plan is not None or balance.policy_cache_bytes
        weight = Weight.POSSIBLE if has_a_policy else Weight.FAINT
    elif failure.kind in _DRIVER_REQUESTS:
        weight = _DRIVER_REQUESTS[failure.kind]
        if failure.activity is Activity.KV_CACHE or evidence.shows_an_engines_start:
            weight = Weight.FAINT  # it was allocating its memory, not mapping it again
        elif failure.kind is FailureKind.ENGINE_WAKE and (evidence.engine_share or 0.0) >= LARGE_ENGINE_SHARE:
            weight = Weight.POSSIBLE
        if not balance.shows_a_holder_of_cache:
            return None
    else:
        return None
    what, cache = _capitalized(failure.kind.meaning), balance.policy_cache_bytes
    if growth := cache_growth(evidence.series):
        grown = _grown("Memory reserved by the policy's torch", growth)
        numbers = {"reserved_first_bytes": growth.trend.first_bytes, "reserved_last_bytes": growth.trend.last_bytes}
        message = f"{grown} while its tensors did not grow; {what}"
        return Finding(Weight.CERTAIN, message, growth.trend.growth_bytes, numbers)
    if cache is None:
        outside = f"{what}; torch's cache is not available to allocations outside of torch"
        return Finding(weight, outside, balance.foreign_bytes())
    if cache < GIB:
        return None
    held = f"{what} while the policy's torch held {human_bytes(cache)} of unused cache"
    return Finding(Weight.CERTAIN, held, cache, {"policy_cache_bytes": cache})


_TITLES = {
    Measure.TENSORS: "Memory in tensors",
    Measure.GPU: "GPU memory",
    Measure.RESERVED: "Memory reserved by torch",
}
_LARGE_GROWTH_SHARE = 0.3
"""Share of the memory at the end from which the growth explains all of it."""
_FEW_VALUES = 8


def retained_graph(balance: Balance) -> Finding | None:
    """Memory in tensors grows with every micro-batch or step (Fast-LLM 486: 164 MiB a micro-batch; verl 6699: 278 MiB).

    Activations come and go within a micro-batch, and the optimizer's state steps up once; only tensors that are kept
    grow steadily.
    """
    failure = balance.failure
    asks_the_driver = failure.kind in _DRIVER_REQUESTS or failure.kind is FailureKind.NO_MESSAGE
    if not asks_the_driver and not failure.is_of_the_gpu:
        return None
    if not balance.growths:
        if failure.activity is not Activity.COLLECTING:
            return None
        more = f"; {human_bytes(failure.requested_bytes)} more did not fit" if failure.requested_bytes else ""
        return Finding(Weight.POSSIBLE, f"Results of all batches are collected on the GPU{more}")
    growth, series = max(
        balance.growths, key=lambda pair: (pair[1].measure is Measure.TENSORS, pair[0].trend.growth_bytes)
    )
    trend, of_tensors = growth.trend, series.measure is Measure.TENSORS
    fills = trend.is_firm and trend.growth_bytes >= _LARGE_GROWTH_SHARE * trend.last_bytes
    if growth.unit == "micro-batch" or (of_tensors and fills):
        weight = Weight.CERTAIN
    elif series.measure is Measure.RESERVED:
        weight = Weight.POSSIBLE
    else:
        weight = Weight.STRONG if of_tensors or fills else Weight.LIKELY
    if trend.values < _FEW_VALUES:
        weight = min(weight, Weight.LIKELY)
    per_unit = growth.per_unit_bytes
    return Finding(
        weight,
        f"{_TITLES[series.measure]} of {series.name} grew from {human_bytes(trend.first_bytes)} to "
        f"{human_bytes(trend.last_bytes)} over {trend.values} samples, {human_bytes(per_unit)} per {growth.unit}",
        trend.growth_bytes,
        {
            "allocated_first_bytes": trend.first_bytes,
            "allocated_last_bytes": trend.last_bytes,
            "growth_per_sample_bytes": trend.mean_growth_bytes,
            "samples": trend.values,
        },
    )


_GROWS_IN_HEALTH = re.compile(r"load|init|creat|build|shard|layer|warm|max|peak", re.IGNORECASE)
"""Searched in the name of a figure: memory that grows while a model is made, or a peak, which never falls."""


def growth_alone(evidence: CollectedEvidence) -> Finding | None:
    """Memory in tensors that has grown a lot, in a log that contains no failure."""
    policies = [series for series in evidence.series if series.is_policy and not _GROWS_IN_HEALTH.search(series.name)]
    growths = [(growth, series) for series in policies if (growth := large_growth(series))]
    if not growths:
        return None
    (first, last), series = max(growths, key=lambda pair: pair[0][1] - pair[0][0])
    title = _TITLES[series.measure]
    title = title if title.startswith("GPU") else f"{title[0].lower()}{title[1:]}"
    return Finding(
        Weight.POSSIBLE,
        f"The log shows no failure, but {title} of {series.name} grew from {human_bytes(first)} to {human_bytes(last)} "
        f"over {len(series.samples)} samples.",
        last - first,
        {"allocated_first_bytes": first, "allocated_last_bytes": last, "samples": len(series.samples)},
    )


def _grown(what: str, growth: PastGrowth) -> str:
    trend = growth.trend
    first, last = human_bytes(trend.first_bytes), human_bytes(trend.last_bytes)
    return f"{what} grew from {first} to {last} over {trend.values} samples"


def _capitalized(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}"
