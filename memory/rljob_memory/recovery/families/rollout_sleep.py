"""vLLM's sleep mode during the update. Levels 1 and 2 free the same GPU memory; level 2 keeps no weights on the host.

Acts on EngineNotAsleep, on every failure of the policy beside an awake engine, and, from level 1 to 2, on HostMemory.
Costs the wake-up, well under a second (vLLM, sleep mode).
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family

_ACTS_ON = frozenset(
    {
        FailureClass.ENGINE_NOT_ASLEEP,
        FailureClass.ACTIVATION_SPIKE,
        FailureClass.OPTIMIZER_STATE,
        FailureClass.HOST_MEMORY,
        FailureClass.UNKNOWN,
    }
)


def _next_change(case: Case) -> Change | None:
    """Expected: the engine's weights and its KV cache on the GPU; its weights in host memory."""
    if not case.shares_gpu:
        return None
    level, weights = case.plan.rollout_sleep_level, case.profile.weight_bytes if case.profile else None
    if case.failure_class is FailureClass.HOST_MEMORY:
        return Change("Level2", weights) if level == 1 else None
    if level > 0 or case.role != "policy":
        return None
    expected = None if weights is None else weights + case.plan.kv_cache_bytes
    return Change("Level2", expected)


ROLLOUT_SLEEP = Family("rollout_sleep", _ACTS_ON, "RespawnRole", "rollout", _next_change)
