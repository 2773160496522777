"""Optimizer offload: the optimizer's state is in host memory, and streams through the GPU in an optimizer step. Costs
a copy each way per update.

Acts on failures outside the optimizer step (KVCacheOversized, WeightSyncSpike), on OptimizerState and on
ActivationSpike, if the host can hold the state. In the other direction it acts on HostMemory, if the GPU can hold the
state.
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.estimate import OPTIMIZER_STEP_BYTES
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family

_ACTS_ON = frozenset(
    {
        FailureClass.OPTIMIZER_STATE,
        FailureClass.ACTIVATION_SPIKE,
        FailureClass.KV_CACHE_OVERSIZED,
        FailureClass.WEIGHT_SYNC_SPIKE,
        FailureClass.HOST_MEMORY,
        FailureClass.UNKNOWN,
    }
)
_BESIDE_AN_ENGINE = frozenset({FailureClass.KV_CACHE_OVERSIZED, FailureClass.WEIGHT_SYNC_SPIKE})
_ROOM_FOR_THE_STATE = 1.25
"""Multiple of the state's size: beside it, the host holds the processes and the weights that are being loaded."""


def _next_change(case: Case) -> Change | None:
    """Expected: the state of one rank, which moves from one memory to the other; less the buckets that are on the GPU
    during an optimizer step, if one failed. A state that is no larger than these, such as that of adapters, stays.
    The sizes of another trainer are unknown; verl brings the state back for the whole update."""
    profile, offloaded = case.profile, case.plan.optimizer_offload
    if not case.on_gpu or not (case.role == "policy" or case.shares_gpu):
        return None
    if profile is None:
        is_read = case.constraints.supported_settings is not None
        helps = is_read and not offloaded and case.failure_class in _BESIDE_AN_ENGINE
        return Change(True, None) if helps else None
    if case.failure_class is FailureClass.HOST_MEMORY:
        free = case.device_free_bytes
        if not offloaded or free is None or free < profile.optimizer_bytes:
            return None
        return Change(False, profile.optimizer_bytes)
    all_ranks = profile.optimizer_bytes * profile.policy_ranks
    if offloaded or _ROOM_FOR_THE_STATE * all_ranks > profile.host_memory_bytes:
        return None
    in_a_step = case.diagnosis.class_name == FailureClass.OPTIMIZER_STATE
    freed = profile.optimizer_bytes - (OPTIMIZER_STEP_BYTES if in_a_step else 0)
    return Change(True, freed) if freed > 0 else None


OPTIMIZER_OFFLOAD = Family("optimizer_offload", _ACTS_ON, "RespawnRole", "policy", _next_change)
