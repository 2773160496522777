"""Memory of the failing process's GPU by holder: other processes, the engine, the policy."""

from __future__ import annotations

from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure
from rljob_memory.sizes import GIB

_LEAST_FOREIGN_BYTES = GIB
_LEAST_FOREIGN_SHARE = 0.05
"""Memory below these that is neither free nor of the process is the driver's: 0.3–0.6 GiB on cards of 24–180 GiB."""
_OWN_BESIDE_TORCH_BYTES = GIB
"""Context, NCCL and libraries of the process itself, if the message covers only torch."""

_SLEEPING_ENGINE_BYTES = 8 * GIB
_SLEEPING_ENGINE_SHARE = 0.15
"""The smaller of the two is what an engine may keep while it sleeps, on large cards and on small ones."""


def foreign_bytes(failure: Failure, known_bytes: int = 0) -> int:
    """Memory that other processes hold, if it is more than the driver's own and the request lacked it; else 0.

    `known_bytes`: memory of other processes that is accounted for, and not included.
    """
    device = failure.device
    if device is None or device.total_bytes is None or device.had_enough_free:
        return 0
    least = max(_LEAST_FOREIGN_BYTES, round(_LEAST_FOREIGN_SHARE * device.total_bytes))
    if device.process_bytes is None:
        least += _OWN_BESIDE_TORCH_BYTES
    foreign = device.foreign_bytes - known_bytes
    return foreign if foreign >= least else 0


def engine_holds_little(failure: Failure, evidence: CollectedEvidence) -> bool:
    """True if, by the memory plan, RLJob's own engine was asleep at the time or not yet started."""
    plan = evidence.plan
    return (
        plan is not None
        and plan.rollout_sleep_level > 0
        and failure.role == "policy"
        and failure.phase in (None, "load", "update")
    )


def awake_engine_bytes(failure: Failure, evidence: CollectedEvidence) -> int:
    """KV cache of an engine that the log shows, and that was not asleep at the time; 0 if there is none.

    The engine may be in the failing process: TRL runs it beside its model, where torch counts its memory as tensors.
    """
    device, engine = failure.device, evidence.engine
    if device is None or engine.asleep or not engine.kv_cache_bytes or failure.in_engine:
        return 0
    elsewhere = device.foreign_bytes
    holds = (device.allocated_bytes or 0) - device.asleep_bytes if evidence.shows_a_trainer or engine.in_process else 0
    return engine.kv_cache_bytes if max(elsewhere, holds) >= engine.kv_cache_bytes else 0


def sleeping_engine_bytes(failure: Failure) -> int:
    """Memory that an engine may keep on the GPU while it sleeps."""
    total = (failure.device.total_bytes if failure.device else None) or 0
    return min(_SLEEPING_ENGINE_BYTES, round(_SLEEPING_ENGINE_SHARE * total))


def policy_beside_the_engine_bytes(failure: Failure, evidence: CollectedEvidence) -> int:
    """Memory of the policy on the GPU of a colocated engine that failed; 0 for other failures, and if unknown."""
    beside = failure.role == "rollout" and not evidence.engines_apart
    return policy_reserved_bytes(evidence) if beside else 0


def policy_cache_bytes(evidence: CollectedEvidence) -> int | None:
    """Cache of the policy process that has the largest one, at its last sample; None if unknown."""
    caches = [
        cache
        for series in evidence.series
        if series.is_policy and (cache := series.samples[-1].cache_bytes) is not None
    ]
    return max(caches, default=None)


def policy_reserved_bytes(evidence: CollectedEvidence) -> int:
    """Memory that torch held in the policy process that holds most, at its last sample; 0 if there is none."""
    held = [
        series.samples[-1].reserved_bytes or series.samples[-1].allocated_bytes
        for series in evidence.series
        if series.is_policy
    ]
    return max(held, default=0)
