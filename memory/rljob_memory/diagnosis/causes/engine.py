"""Causes in the engine: its share of the GPU, its sleep."""

from __future__ import annotations

from rljob_api.memory_failure import Activity, FailureKind
from rljob_memory.diagnosis.balance import LARGE_ENGINE_SHARE, LARGE_SHARE, Balance
from rljob_memory.diagnosis.causes.finding import Finding, Weight
from rljob_memory.diagnosis.causes.last_request import ITS_START
from rljob_memory.sizes import MIB, human_bytes

_ENGINES_WORK = {
    Activity.KV_CACHE: Weight.STRONG,
    Activity.ENGINE_PROFILING: Weight.LIKELY,
    Activity.ENGINE_WARM_UP: Weight.LIKELY,
    Activity.GRAPH_CAPTURE: Weight.LIKELY,
    Activity.SAMPLING: Weight.LIKELY,
    Activity.LOGITS: Weight.LIKELY,
}
_DOING = {
    Activity.GRAPH_CAPTURE: "to capture its CUDA graphs",
    Activity.SAMPLING: "for the logits of the sequences that it samples at once",
    Activity.LOGITS: "for the logits of the sequences that it computes at once",
    Activity.ENGINE_PROFILING: "for its profiling pass",
    Activity.ENGINE_WARM_UP: "for its warm-up",
}
_WEIGHT_ACTIVITIES = frozenset(
    {Activity.MODEL_LOAD, Activity.WEIGHT_SYNC, Activity.GATHERING, Activity.CHECKPOINT, Activity.OPTIMIZER}
)
_LITTLE_IN_USE = 0.1
"""Share of the GPU below which unexplained memory does not point to another process."""


def kv_cache_oversized(balance: Balance) -> Finding | None:
    """The engine's share of the GPU is wrong: larger than the free memory, or smaller than the engine needs.

    vLLM reports it at its start (vllm/v1/worker/gpu_worker.py, vllm/v1/core/kv_cache_utils.py). Later, an engine that
    fails in its own allocations while generating has given too much of its share to the cache.
    """
    failure, evidence = balance.failure, balance.evidence
    match failure.kind:
        case FailureKind.KV_CACHE_TOO_SMALL:
            return _too_few_blocks(balance)
        case FailureKind.ENGINE_START:
            return _too_large_a_share(balance)
        case FailureKind.ENGINE_WARM_UP:
            return Finding(
                Weight.STRONG, "After allocating its KV cache the engine had too little memory left to warm up"
            )
        case FailureKind.ENGINE_WAKE:
            return _too_large_to_wake(balance)
    is_request = failure.is_of_the_gpu and failure.kind is not FailureKind.COMPILED
    if is_request and failure.in_engine and failure.activity not in _WEIGHT_ACTIVITIES:
        activity = failure.activity
        weight = _ENGINES_WORK.get(activity, Weight.POSSIBLE) if activity else Weight.POSSIBLE
        if activity in ITS_START and balance.has_cache_for_the_request:
            weight = Weight.POSSIBLE  # torch's cache has the memory: a smaller share of the GPU changes nothing
        if failure.exceeds_every_gpu and activity is not Activity.KV_CACHE:
            weight = Weight.FAINT  # no share of the GPU leaves room for it
        if balance.foreign_bytes() or balance.weights_fill_the_engine:
            weight = min(weight, Weight.FAINT)
        doing = (_DOING.get(activity) if activity else None) or "for its work"
        place = "Within its share of the GPU" if evidence.engine.kv_cache_bytes is None else "Next to its KV cache"
        return Finding(weight, f"{place} the engine had too little memory left {doing}", balance.requested_bytes)
    if failure.kind is not FailureKind.ALLOCATOR or failure.activity or failure.role or evidence.shows_a_trainer:
        return None
    return _by_its_traces(balance)


def _by_its_traces(balance: Balance) -> Finding | None:
    """CUDA graphs or a KV cache show an engine, if nothing else shows the program: few trainers have any."""
    evidence, device, failure = balance.evidence, balance.device, balance.failure
    if device is None:
        return None
    more = f"{human_bytes(device.requested_bytes)} more did not fit"
    graphs, cache = device.private_pool_bytes, evidence.engine.kv_cache_bytes
    if graphs and not device.asleep_bytes and not balance.foreign_bytes() and not evidence.trains:
        held = f"The process holds {human_bytes(graphs)} of CUDA graphs, as engines do; next to its KV cache {more}"
        return Finding(Weight.POSSIBLE, held, device.requested_bytes)
    if not cache or failure.steps_done or evidence.series:
        return None
    held = f"Next to its KV cache of {human_bytes(cache)} the engine had too little memory left: {more}"
    return Finding(Weight.POSSIBLE, held, device.requested_bytes)


def _too_few_blocks(balance: Balance) -> Finding:
    needed, available = (balance.failure.sizes.get(f"{name}_bytes") for name in ("needed", "available"))
    reason = "weights and activations leave too little for the blocks of the KV cache"
    if needed is not None and available is not None:
        reason = f"one request of full length needs {human_bytes(needed)}, and {human_bytes(available)} are left for it"
    return Finding(Weight.STRONG, f"The engine's share of the GPU is too small: {reason}")


def _too_large_a_share(balance: Balance) -> Finding:
    evidence = balance.evidence
    free, total, wanted = (balance.failure.sizes.get(f"{name}_bytes", 0) for name in ("free", "total", "wanted"))
    unexplained = total - free - balance.policy_reserved_bytes
    by_the_job = unexplained < _LITTLE_IN_USE * total or evidence.shows_a_trainer or evidence.siblings
    holder = ": the trainer's own model holds the rest" if evidence.shows_a_trainer else ""
    return Finding(
        Weight.STRONG if by_the_job else Weight.POSSIBLE,
        f"The engine was configured to take {human_bytes(wanted)} of {human_bytes(total)}, but only "
        f"{human_bytes(free)} were free{holder}",
        wanted - free,
    )


def _too_large_to_wake(balance: Balance) -> Finding:
    evidence, engine = balance.evidence, balance.evidence.engine
    if balance.failure.activity is Activity.KV_CACHE:
        return Finding(Weight.STRONG, "The KV cache did not fit on the GPU")
    if evidence.shows_an_engines_start:
        size = human_bytes(engine.kv_cache_bytes or 0)
        return Finding(Weight.LIKELY, f"The engine's KV cache of {size} did not fit on the GPU at its start")
    if (evidence.engine_share or 0.0) >= LARGE_ENGINE_SHARE:
        share = f"a share of {evidence.engine_share:.0%} of the GPU"
        return Finding(Weight.LIKELY, f"The engine woke with {share}, which did not fit next to the trainer's memory")
    freed = f" of {human_bytes(engine.freed_bytes)}" if engine.freed_bytes else ""
    in_use = f" next to {human_bytes(engine.still_in_use_bytes)} in use" if engine.still_in_use_bytes else ""
    return Finding(Weight.POSSIBLE, f"The engine's memory{freed} no longer fit on the GPU when it woke{in_use}")


FREED_NOTHING_BYTES = 256 * MIB


def engine_not_asleep(balance: Balance) -> Finding | None:
    """The engine keeps its weights and its KV cache on the GPU while the policy works.

    vLLM's log of its sleep is the best evidence: `Sleep mode freed 0.00 GiB` is the result of expandable segments in
    the engine's environment (vLLM issue 14189). A sleeping engine still holds 1–7 GiB: context, NCCL, CUDA graphs.
    """
    failure, evidence = balance.failure, balance.evidence
    engine, kind = evidence.engine, failure.kind
    if kind is FailureKind.ENGINE_SLEEP:
        return Finding(Weight.POSSIBLE, "More GPU memory was in use after the engine went to sleep than before")
    if evidence.engines_apart or failure.in_engine:
        return None
    if kind not in (FailureKind.ALLOCATOR, FailureKind.DRIVER, FailureKind.NCCL):
        return None
    if engine.asleep and engine.freed_bytes is not None and engine.freed_bytes < FREED_NOTHING_BYTES:
        still = f" and left {human_bytes(engine.still_in_use_bytes)} in use" if engine.still_in_use_bytes else ""
        freed = f"The engine's last sleep freed {human_bytes(engine.freed_bytes)}{still}, then the policy ran out"
        left = engine.still_in_use_bytes or 0
        return Finding(Weight.CERTAIN, freed, left, {"freed_by_sleep_bytes": engine.freed_bytes})
    held, foreign = balance.engine_kv_cache_bytes, balance.foreign_bytes()
    if balance.share(held) >= LARGE_SHARE:
        size, total = human_bytes(held), human_bytes(balance.total_bytes)
        kept = f"The engine's KV cache, {size} of the GPU's {total}, stayed on the GPU while the policy worked"
        return Finding(Weight.STRONG, kept, held, {"kv_cache_bytes": held})
    if balance.engine_holds_little or foreign <= balance.sleeping_engine_bytes:
        return None
    if evidence.siblings is not None and not balance.engine_siblings:
        return None  # the process knows that no engine of its container uses a GPU
    if evidence.plan is not None and evidence.plan.rollout_sleep_level == 0:
        weight, why = Weight.STRONG, "and the memory plan keeps the engine awake"
    elif balance.engine_siblings and not engine.asleep:
        names = ", ".join(balance.engine_siblings)
        weight, why = Weight.STRONG, f"and an engine of the same job ({names}) is one of them, without a sign of sleep"
    elif engine.seen and not engine.asleep:
        weight, why = Weight.STRONG, "and there is no sign that the engine was asleep"
    elif failure.role == "policy":
        weight, why = Weight.LIKELY, "as much as an engine that is awake"
    elif engine.seen:
        weight, why = Weight.POSSIBLE, "more than a sleeping engine keeps"
    else:
        return None
    message = f"{human_bytes(foreign)} of the GPU belonged to other processes than the policy, {why}"
    return Finding(weight, message, foreign, {"other_processes_bytes": foreign})
