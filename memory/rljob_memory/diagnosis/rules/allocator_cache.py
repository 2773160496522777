"""torch's cache in one process holds memory that another process asks the driver for.

torch empties its cache before it raises, so in the failing process the cache is never the cause. But vLLM's wake-up
(cuMemCreate), NCCL and cuBLAS ask the driver directly, and nothing empties torch's cache for them: they fail, and the
policy holds the memory (Trinity-RFT 541, verl 575 and 6912, slime 669).
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.growth import cache_growth
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.diagnosis.rules.controller_context import context_sized
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import GIB, human_bytes

_BY_TEXT = {
    FailureKind.ENGINE_WAKE: 0.6,
    FailureKind.NCCL: 0.5,
    FailureKind.MATH_LIBRARY: 0.4,
}
"""Confidence from the message alone. cuBLAS also fails to allocate if indices are out of range, or versions clash."""
_LARGE_CACHE_BYTES = GIB
_LARGE_SHARE = 0.75
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
    return (evidence.engine_share or 0.0) >= _LARGE_SHARE


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
    return f"{kind[0].upper()}{kind[1:]}"
