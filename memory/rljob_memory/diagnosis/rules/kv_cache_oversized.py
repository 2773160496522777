"""The engine's share of the GPU is wrong: larger than the free memory, or smaller than the engine needs.

vLLM reports it at its start (vllm/v1/worker/gpu_worker.py, vllm/v1/core/kv_cache_utils.py). Later, an engine that fails
in its own allocations while generating has given too much of its share to the cache.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.gpu_holders import foreign_bytes, policy_reserved_bytes
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import human_bytes

_BY_ACTIVITY = {Activity.KV_CACHE: 0.75, Activity.ENGINE_WARM_UP: 0.65, Activity.GENERATION: 0.55}
_LITTLE_IN_USE = 0.1


def kv_cache_oversized(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    match failure.kind:
        case FailureKind.KV_CACHE_TOO_SMALL:
            return _too_few_blocks(failure)
        case FailureKind.ENGINE_START:
            return _too_large_a_share(failure, evidence)
        case FailureKind.ENGINE_WARM_UP:
            return Diagnosis(
                FailureClass.KV_CACHE_OVERSIZED,
                0.75,
                "After allocating its KV cache the engine had too little memory left to warm up",
            )
        case FailureKind.ENGINE_WAKE if failure.activity is Activity.KV_CACHE:
            return Diagnosis(
                FailureClass.KV_CACHE_OVERSIZED, _BY_ACTIVITY[Activity.KV_CACHE], "The KV cache did not fit on the GPU"
            )
        case FailureKind.ENGINE_WAKE:
            return _too_large_to_wake(evidence)
        case FailureKind.ALLOCATOR | FailureKind.DRIVER if (
            failure.in_engine and failure.activity is not Activity.MODEL_LOAD
        ):
            confidence = _BY_ACTIVITY.get(failure.activity, 0.5) if failure.activity else 0.5
            if foreign_bytes(failure):
                confidence = min(confidence, 0.45)
            return Diagnosis(
                FailureClass.KV_CACHE_OVERSIZED,
                confidence,
                "Beside its KV cache the engine had too little memory left for its work",
            )
        case _:
            return None


def _too_few_blocks(failure: Failure) -> Diagnosis:
    needed, available = failure.sizes.get("needed_bytes"), failure.sizes.get("available_bytes")
    if needed is not None and available is not None:
        reason = f"one request of full length needs {human_bytes(needed)}, and {human_bytes(available)} are left for it"
    else:
        reason = "weights and activations leave too little for the blocks of the KV cache"
    return Diagnosis(FailureClass.KV_CACHE_OVERSIZED, 0.75, f"The engine's share of the GPU is too small: {reason}")


def _too_large_a_share(failure: Failure, evidence: CollectedEvidence) -> Diagnosis:
    sizes = failure.sizes
    free, total, wanted = (sizes.get(f"{name}_bytes", 0) for name in ("free", "total", "wanted"))
    unexplained = total - free - policy_reserved_bytes(evidence)
    confidence = 0.7 if unexplained < _LITTLE_IN_USE * total else 0.45
    return Diagnosis(
        FailureClass.KV_CACHE_OVERSIZED,
        confidence,
        f"The engine was configured to take {human_bytes(wanted)} of {human_bytes(total)}, but only "
        f"{human_bytes(free)} were free",
    )


def _too_large_to_wake(evidence: CollectedEvidence) -> Diagnosis:
    engine = evidence.engine
    freed = f" of {human_bytes(engine.freed_bytes)}" if engine.freed_bytes else ""
    beside = f" beside {human_bytes(engine.still_in_use_bytes)} in use" if engine.still_in_use_bytes else ""
    return Diagnosis(
        FailureClass.KV_CACHE_OVERSIZED,
        0.5,
        f"The engine's memory{freed} no longer fit on the GPU when it woke{beside}",
    )
