"""Rules for the memory of the engine: its sleep, its KV cache, the weights that it receives."""

from __future__ import annotations

from rljob_api.memory_failure import Activity
from rljob_memory.diagnosis.classes import Diagnosis, FailureClass
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.diagnosis.rules.policy_memory import fills_the_gpu_with_weights
from rljob_memory.diagnosis.rules.torch_cache import takes_most_of_the_gpu
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import GIB, MIB, human_bytes

# The engine's share of the GPU is wrong: larger than the free memory, or smaller than the engine needs.
#
# vLLM reports it at its start (vllm/v1/worker/gpu_worker.py, vllm/v1/core/kv_cache_utils.py). Later, an engine that
# fails in its own allocations while generating has given too much of its share to the cache.

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


# The engine keeps its weights and its KV cache on the GPU while the policy works.
#
# vLLM's log of its sleep is the best evidence: `Sleep mode freed 0.00 GiB` is the result of expandable segments in the
# engine's environment (vLLM issue 14189). A sleeping engine still holds 1–7 GiB: context, NCCL, CUDA graphs.

_FREED_NOTHING_BYTES = 256 * MIB
_WEIGHTS_BYTES = 4 * GIB
"""More than what a sleeping engine keeps beside its weights."""
_LARGE_SHARE = 0.25
"""Share of the card: an engine with less does not take a policy's room."""


_OF_A_LARGE_ONE, _SLOPE, _MOST = 0.7, 0.2, 0.8
"""Confidence in an engine of that share, how much it grows with the share, and its most."""


def engine_not_asleep(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    engine, kind = evidence.engine, failure.kind
    if kind is FailureKind.ENGINE_SLEEP:
        return Diagnosis(
            FailureClass.ENGINE_NOT_ASLEEP,
            0.5,
            "More GPU memory was in use after the engine went to sleep than before",
        )
    if evidence.engines_apart or failure.in_engine:
        return None
    if kind not in (FailureKind.ALLOCATOR, FailureKind.DRIVER, FailureKind.NCCL):
        return None
    if engine.asleep and engine.freed_bytes is not None and engine.freed_bytes < _FREED_NOTHING_BYTES:
        still = f" and left {human_bytes(engine.still_in_use_bytes)} in use" if engine.still_in_use_bytes else ""
        return Diagnosis(
            FailureClass.ENGINE_NOT_ASLEEP,
            0.9,
            f"The engine's last sleep freed {human_bytes(engine.freed_bytes)}{still}, then the policy ran out",
            {"freed_by_sleep_bytes": engine.freed_bytes},
        )
    if awake := _large_and_awake(failure, evidence, ledger):
        return awake
    plan, foreign = evidence.plan, ledger.foreign_bytes()
    if ledger.engine_holds_little or foreign <= ledger.sleeping_engine_bytes:
        return None
    if evidence.siblings is not None and not ledger.engine_siblings:
        return None  # The process knows that no engine of its container uses a GPU.
    held = f"{human_bytes(foreign)} of the GPU belonged to other processes than the policy"
    if plan is not None and plan.rollout_sleep_level == 0:
        confidence, why = 0.85, "and the memory plan keeps the engine awake"
    elif ledger.engine_siblings and not engine.asleep:
        names = ", ".join(ledger.engine_siblings)
        confidence, why = 0.75, f"and an engine of the same job ({names}) is one of them, with no sign that it slept"
    elif engine.seen and not engine.asleep:
        confidence, why = 0.7, "and there is no sign that the engine was asleep"
    elif failure.role == "policy":
        confidence, why = 0.6, "as much as an engine that is awake"
    elif engine.seen:
        confidence, why = 0.5, "more than a sleeping engine keeps"
    else:
        return None
    return Diagnosis(FailureClass.ENGINE_NOT_ASLEEP, confidence, f"{held}, {why}", {"other_processes_bytes": foreign})


def sleep_alone(evidence: CollectedEvidence) -> Diagnosis | None:
    """A sleep of level 1, which copies the weights to the host and frees them, did not find any, in a log without a
    failure: the weights are not in the engine's own pool, and stay on the GPU."""
    engine = evidence.engine
    if engine.sleep_level != 1 or engine.backed_up_bytes is None or engine.still_in_use_bytes is None:
        return None
    if engine.backed_up_bytes >= _FREED_NOTHING_BYTES or engine.still_in_use_bytes < _WEIGHTS_BYTES:
        return None
    return Diagnosis(
        FailureClass.ENGINE_NOT_ASLEEP,
        0.5,
        f"The log shows no failure, but the engine's sleep of level 1 copied {human_bytes(engine.backed_up_bytes)} of "
        f"weights to the host, and {human_bytes(engine.still_in_use_bytes)} stayed in use on the GPU.",
        {"still_in_use_bytes": engine.still_in_use_bytes, "failures": 0},
    )


def _large_and_awake(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    """The KV cache of an engine beside the policy is a large part of the card, and the log shows no sleep."""
    total = (failure.device.total_bytes if failure.device else None) or 0
    held = ledger.engine_kv_cache_bytes
    if not total or held < _LARGE_SHARE * total:
        return None
    return Diagnosis(
        FailureClass.ENGINE_NOT_ASLEEP,
        round(min(_OF_A_LARGE_ONE + _SLOPE * (held / total - _LARGE_SHARE), _MOST), 2),
        f"The engine's KV cache, {human_bytes(held)} of the GPU's {human_bytes(total)}, stayed on the GPU while the "
        "policy worked",
        {"kv_cache_bytes": held},
    )


# Sending the weights to the engine needs full copies of them for a moment: gathered parameters, packed buckets.
#
# The stack or the phase shows that it was then (verl 6729 and 6772, SkyRL 1623). Saving a checkpoint gathers the
# weights in the same way (SkyRL 70), and looks the same in memory.

_COPIES = {Activity.WEIGHT_SYNC: 0.75, Activity.GATHERING: 0.65, Activity.CHECKPOINT: 0.5}
_WHAT = {
    Activity.WEIGHT_SYNC: "The copies of the weights for the engine",
    Activity.GATHERING: "The full parameters, gathered from all ranks,",
    Activity.CHECKPOINT: "The copies of the weights for a checkpoint",
}


def weight_sync_spike(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    of_the_gpu = failure.is_of_the_gpu or failure.kind in (FailureKind.NCCL, FailureKind.ENGINE_WAKE)
    if not of_the_gpu:
        return None
    if failure.kind is FailureKind.ENGINE_WAKE:
        # While the engine wakes, its own memory fails; the copies are at most in the way.
        confidence = 0.45 if failure.phase == "sync" else 0.0
    elif failure.phase == "sync":
        confidence = 0.75 if failure.activity in _COPIES else 0.7
    else:
        confidence = _COPIES.get(failure.activity, 0.0) if failure.activity else 0.0
    if not confidence:
        return None
    device, what = failure.device, _WHAT.get(failure.activity or Activity.WEIGHT_SYNC, _WHAT[Activity.WEIGHT_SYNC])
    more = f": {human_bytes(device.requested_bytes)} more did not fit" if device else ""
    return Diagnosis(
        FailureClass.WEIGHT_SYNC_SPIKE,
        confidence,
        f"{what} needed more memory than was left{more}",
    )
