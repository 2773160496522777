"""Policy offload: the weights of the policy are in host memory while the engine on the same GPU generates. Costs a copy
each way per step.

Acts on failures of an engine that starts, wakes its KV cache or generates, if the host can hold the weights. It frees
nothing in an update or while weights are sent: the policy needs them there.
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family

_ACTS_ON = frozenset({FailureClass.KV_CACHE_OVERSIZED, FailureClass.ACTIVATION_SPIKE, FailureClass.UNKNOWN})
_ROOM_FOR_THE_COPY = 1.25
"""Multiple of the copy's size: beside it, the host holds the processes."""


def _next_change(case: Case) -> Change | None:
    """Expected: the weights of one rank."""
    profile, plan = case.profile, case.plan
    if profile is None or not profile.policy_weight_bytes or plan.policy_offload:
        return None
    if not case.shares_gpu or plan.rollout_sleep_level == 0 or not _engine_had_its_kv_cache(case):
        return None
    offloaded = profile.policy_weight_bytes + (profile.optimizer_bytes if plan.optimizer_offload else 0)
    if _ROOM_FOR_THE_COPY * offloaded * profile.policy_ranks > profile.host_memory_bytes:
        return None
    return Change(True, profile.policy_weight_bytes)


def _engine_had_its_kv_cache(case: Case) -> bool:
    """In a sync, the engine has its KV cache only once it has received the weights."""
    if case.role != "rollout" or case.phase == "update" or case.number("needed_bytes"):
        return False  # the last: the KV cache as planned is too small for one sequence
    return case.phase != "sync" or case.failure_class is FailureClass.KV_CACHE_OVERSIZED


POLICY_OFFLOAD = Family("policy_offload", _ACTS_ON, "Live", "policy", _next_change)
