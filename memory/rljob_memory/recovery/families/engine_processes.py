"""New processes for engines that keep memory: a leak of an engine ends with its process.

Acts on EngineNotAsleep and HostMemory. Engines have been seen to keep more GPU memory after each sleep (NVIDIA-NeMo/RL
2619, vllm-project/vllm 36651); no setting prevents that. Costs the start of an engine, and no step: its weights come
with the next sync.
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family
from rljob_memory.recovery.state import ENGINE_PROCESSES

_ACTS_ON = frozenset({FailureClass.ENGINE_NOT_ASLEEP, FailureClass.HOST_MEMORY})


def _next_change(case: Case) -> Change | None:
    """Expected: before a failure, the growth of the engine; after one, all memory that it kept while it slept.

    After a failure it is tried once: an engine that keeps as much from its start does not leak, and one that leaks is
    replaced before the next failure.
    """
    if case.is_preventive:
        growth = case.number("own_growth_bytes") if case.role == "rollout" else None
        return Change("fresh", growth) if growth else None
    sleeps = case.shares_gpu and case.plan.rollout_sleep_level > 0
    tried = any(change.remedy.setting == ENGINE_PROCESSES and not change.preventive for change in case.state.changes)
    if case.failure_class is not FailureClass.ENGINE_NOT_ASLEEP or not sleeps or tried:
        return None
    return Change("fresh", case.number("other_processes_bytes"))


FRESH_ENGINES = Family(ENGINE_PROCESSES, _ACTS_ON, "RespawnRole", "rollout", _next_change)
