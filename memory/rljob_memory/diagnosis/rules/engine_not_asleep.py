"""The engine keeps its weights and its KV cache on the GPU while the policy works.

vLLM's log of its sleep is the best evidence: `Sleep mode freed 0.00 GiB` is the result of expandable segments in the
engine's environment (vLLM issue 14189). A sleeping engine still holds 1–7 GiB: context, NCCL, CUDA graphs.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import GIB, MIB, human_bytes

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
