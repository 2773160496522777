"""The engine's share of the GPU is wrong: larger than the free memory, or smaller than the engine needs.

vLLM reports it at its start (vllm/v1/worker/gpu_worker.py, vllm/v1/core/kv_cache_utils.py). Later, an engine that fails
in its own allocations while generating has given too much of its share to the cache.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.diagnosis.rules.allocator_cache import takes_most_of_the_gpu
from rljob_memory.diagnosis.rules.model_weights import fills_the_gpu_with_weights
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import human_bytes

_BY_ACTIVITY = {
    Activity.KV_CACHE: 0.75,
    Activity.ENGINE_PROFILING: 0.65,
    Activity.ENGINE_WARM_UP: 0.65,
    Activity.GRAPH_CAPTURE: 0.65,
    Activity.SAMPLING: 0.6,
    Activity.LOGITS: 0.6,
    Activity.ENGINE_STEP: 0.55,
    Activity.GENERATION: 0.55,
}
_DOING = {
    Activity.GRAPH_CAPTURE: "to capture its CUDA graphs",
    Activity.SAMPLING: "for the logits of the sequences that it samples at once",
    Activity.LOGITS: "for the logits of the sequences that it computes at once",
    Activity.ENGINE_PROFILING: "for its profiling pass",
    Activity.ENGINE_WARM_UP: "for its warm-up",
}
_OF_THE_WEIGHTS = frozenset(
    {Activity.MODEL_LOAD, Activity.WEIGHT_SYNC, Activity.GATHERING, Activity.CHECKPOINT, Activity.OPTIMIZER}
)
_LITTLE_IN_USE = 0.1


def kv_cache_oversized(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    match failure.kind:
        case FailureKind.KV_CACHE_TOO_SMALL:
            return _too_few_blocks(failure)
        case FailureKind.ENGINE_START:
            return _too_large_a_share(failure, evidence, ledger)
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
        case FailureKind.ALLOCATOR | FailureKind.DRIVER | FailureKind.UNFAMILIAR if (
            failure.in_engine and failure.is_of_the_gpu and failure.activity not in _OF_THE_WEIGHTS
        ):
            confidence = _BY_ACTIVITY.get(failure.activity, 0.5) if failure.activity else 0.5
            if failure.exceeds_every_gpu and failure.activity is not Activity.KV_CACHE:
                confidence = 0.4  # no share of the GPU leaves room for it
            if ledger.foreign_bytes() or fills_the_gpu_with_weights(failure):
                confidence = min(confidence, 0.45)
            return Diagnosis(
                FailureClass.KV_CACHE_OVERSIZED,
                confidence,
                f"Beside its KV cache the engine had too little memory left {_doing(failure)}",
            )
        case FailureKind.ALLOCATOR:
            return _by_its_graphs(failure, evidence, ledger) or _by_its_start(failure, evidence)
        case _:
            return None


def _by_its_graphs(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    """CUDA graphs show an engine, if nothing else shows the program: few trainers capture any."""
    device = failure.device
    if failure.activity or failure.role or evidence.shows_a_trainer or evidence.trains or device is None:
        return None
    if not device.private_pool_bytes or device.asleep_bytes or ledger.foreign_bytes():
        return None
    return Diagnosis(
        FailureClass.KV_CACHE_OVERSIZED,
        0.45,
        f"The process holds {human_bytes(device.private_pool_bytes)} of CUDA graphs, as engines do; beside its KV "
        f"cache {human_bytes(device.requested_bytes)} more did not fit",
    )


def _by_its_start(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    """The log has an engine's start, nothing else shows the program, and nothing was trained."""
    cache, device = evidence.engine.kv_cache_bytes, failure.device
    if failure.activity or failure.role or failure.steps_done or evidence.shows_a_trainer or evidence.series:
        return None
    if not cache or device is None:
        return None
    return Diagnosis(
        FailureClass.KV_CACHE_OVERSIZED,
        0.5,
        f"Beside its KV cache of {human_bytes(cache)} the engine had too little memory left: "
        f"{human_bytes(device.requested_bytes)} more did not fit",
    )


def _doing(failure: Failure) -> str:
    return (_DOING.get(failure.activity) if failure.activity else None) or "for its work"


def _too_few_blocks(failure: Failure) -> Diagnosis:
    needed, available = failure.sizes.get("needed_bytes"), failure.sizes.get("available_bytes")
    if needed is not None and available is not None:
        reason = f"one request of full length needs {human_bytes(needed)}, and {human_bytes(available)} are left for it"
    else:
        reason = "weights and activations leave too little for the blocks of the KV cache"
    return Diagnosis(FailureClass.KV_CACHE_OVERSIZED, 0.75, f"The engine's share of the GPU is too small: {reason}")


def _too_large_a_share(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis:
    sizes = failure.sizes
    free, total, wanted = (sizes.get(f"{name}_bytes", 0) for name in ("free", "total", "wanted"))
    unexplained = total - free - ledger.policy_reserved_bytes
    by_the_job = unexplained < _LITTLE_IN_USE * total or evidence.shows_a_trainer or evidence.siblings
    confidence = 0.7 if by_the_job else 0.45
    holder = ": the trainer's own model holds the rest" if evidence.shows_a_trainer else ""
    return Diagnosis(
        FailureClass.KV_CACHE_OVERSIZED,
        confidence,
        f"The engine was configured to take {human_bytes(wanted)} of {human_bytes(total)}, but only "
        f"{human_bytes(free)} were free{holder}",
    )


def _too_large_to_wake(evidence: CollectedEvidence) -> Diagnosis:
    engine = evidence.engine
    if evidence.shows_an_engines_start:
        size = human_bytes(engine.kv_cache_bytes or 0)
        return Diagnosis(
            FailureClass.KV_CACHE_OVERSIZED, 0.6, f"The engine's KV cache of {size} did not fit on the GPU at its start"
        )
    if takes_most_of_the_gpu(evidence):
        return Diagnosis(
            FailureClass.KV_CACHE_OVERSIZED,
            0.6,
            f"The engine woke with a share of {evidence.engine_share:.0%} of the GPU, which did not fit beside the "
            "trainer's memory",
        )
    freed = f" of {human_bytes(engine.freed_bytes)}" if engine.freed_bytes else ""
    beside = f" beside {human_bytes(engine.still_in_use_bytes)} in use" if engine.still_in_use_bytes else ""
    return Diagnosis(
        FailureClass.KV_CACHE_OVERSIZED,
        0.5,
        f"The engine's memory{freed} no longer fit on the GPU when it woke{beside}",
    )
