"""The engine keeps its weights and its KV cache on the GPU while the policy works.

What vLLM logs of its sleep is the best witness: `Sleep mode freed 0.00 GiB` is what expandable segments in the engine's
environment lead to (vLLM issue 14189). Asleep, an engine still holds 1–7 GiB: context, NCCL, CUDA graphs.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.situation import Situation
from rljob_memory.estimate import GIB, MIB
from rljob_memory.evidence.failure import FailureKind
from rljob_memory.evidence.sizes import human_bytes

_FREED_NOTHING_BYTES = 256 * MIB
_SLEEPING_ENGINE_BYTES = 8 * GIB
_SLEEPING_ENGINE_SHARE = 0.15
"""The smaller of the two is what an engine may keep in its sleep, on large cards and on small ones."""


def sleeping_engine_bytes(situation: Situation) -> int:
    """What an engine may keep of the failing process's GPU in its sleep."""
    total = (situation.device.total_bytes if situation.device else None) or 0
    return min(_SLEEPING_ENGINE_BYTES, round(_SLEEPING_ENGINE_SHARE * total))


def engine_not_asleep(situation: Situation) -> Diagnosis | None:
    engine, kind = situation.evidence.engine, situation.failure.kind
    if kind is FailureKind.ENGINE_SLEEP:
        return Diagnosis(
            FailureClass.ENGINE_NOT_ASLEEP,
            0.5,
            "More memory of the GPU was in use after the engine's sleep than before it",
        )
    if situation.failure.in_engine or kind not in (FailureKind.ALLOCATOR, FailureKind.DRIVER, FailureKind.NCCL):
        return None
    if engine.asleep and engine.freed_bytes is not None and engine.freed_bytes < _FREED_NOTHING_BYTES:
        still = f" and left {human_bytes(engine.still_in_use_bytes)} in use" if engine.still_in_use_bytes else ""
        return Diagnosis(
            FailureClass.ENGINE_NOT_ASLEEP,
            0.9,
            f"The engine's last sleep freed {human_bytes(engine.freed_bytes)}{still}, then the policy ran out",
            {"freed_by_sleep_bytes": engine.freed_bytes},
        )
    plan, foreign = situation.evidence.plan, situation.foreign_bytes
    if situation.engine_holds_little or foreign <= sleeping_engine_bytes(situation):
        return None
    held = f"{human_bytes(foreign)} of the GPU were not the policy's"
    if plan is not None and plan.rollout_sleep_level == 0:
        confidence, why = 0.85, "and the plan lets the engine stay awake"
    elif engine.seen and not engine.asleep:
        confidence, why = 0.7, "and nothing says that the engine was asleep"
    elif situation.failure.role == "policy":
        confidence, why = 0.6, "as much as an engine holds that is awake"
    elif engine.seen:
        confidence, why = 0.5, "more than a sleeping engine keeps"
    else:
        return None
    return Diagnosis(FailureClass.ENGINE_NOT_ASLEEP, confidence, f"{held}, {why}", {"other_processes_bytes": foreign})
