"""torch's cache is large enough for the request, but no piece of it is.

Before the allocator gives up it returns every cached block that is whole (CUDACachingAllocator.cpp,
`release_cached_blocks`). The rest cannot be returned: the free parts of segments that also hold tensors. So a cache at
least as large as the request is fragmentation by definition; whether it is the cause, or only a side effect on a full
card, depends on its share.
"""

from __future__ import annotations

import re

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.growth import cache_growth
from rljob_memory.diagnosis.ledger import ORDINARY_CACHE_SHARE, Ledger
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import MIB, human_bytes, size_bytes

_NAMED = re.compile(r"[Dd]ue to fragmentation|largest (?:contiguous|free|available) (?:region|block|chunk)")
"""XLA's words."""
_RESERVABLE = re.compile(
    r"reserve (?P<wanted>[\d.]{1,9}[KMGT]) .{0,80}There are (?P<free>[\d.]{1,9}[KMGT]) free, .{0,40}? "
    r"(?P<piece>[\d.]{1,9}[KMGT]) reservable"
)
"""XLA's words on a TPU, with the free memory and its largest piece."""
_LARGE_SHARE = 0.1
"""Share of reserved memory. Ordinary jobs leave 1–5 % unallocated at the end; the jobs in public threads that
expandable segments cured had 11–45 %."""
_LEAST_SHARE_OF_THE_GPU = 0.02
"""A smaller cache is a side effect on a GPU that something else has filled."""
_LEAST_SHARE = 0.03
"""A smaller share is what any allocator leaves between tensors, however small the request that failed."""
_MANY_TIMES = 8
"""Pieces of a small cache that are all too small, although together they have so many times the request."""
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
    if failure.kind is FailureKind.DRIVER and _NAMED.search(failure.text):
        return Diagnosis(
            FailureClass.FRAGMENTATION, 0.7, "The allocator reports that no piece of its free memory is large enough"
        )
    if (found := _RESERVABLE.search(failure.text)) and _is_in_pieces(found):
        return Diagnosis(
            FailureClass.FRAGMENTATION,
            0.7,
            f"{found['wanted']} did not fit although {found['free']} were free, of which {found['piece']} in one piece",
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
    if largest is not None and largest < requested <= cached and share >= _LARGE_SHARE:
        confidence = 0.9
    elif cached >= _ENOUGH * requested and share >= _LARGE_SHARE:
        confidence = 0.85
    elif cached >= _CLEARLY_ENOUGH * requested and cached >= _WORTH_MENTIONING_BYTES and share >= ORDINARY_CACHE_SHARE:
        confidence = 0.6
    elif device.free_bytes is None and share >= _LARGE_SHARE and cached >= _PART_OF_THE_REQUEST * requested:
        confidence = 0.35
    elif free < requested and (cached >= least_cached or (share >= _LARGE_SHARE and cached + free >= requested)):
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


def _is_in_pieces(found: re.Match[str]) -> bool:
    wanted, free, piece = (size_bytes(found[name]) or 0 for name in ("wanted", "free", "piece"))
    return piece < wanted <= free


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
