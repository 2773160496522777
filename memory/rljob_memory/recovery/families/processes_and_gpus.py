"""Remedies outside the memory plan of a process: new processes, another node, more GPUs."""

from __future__ import annotations

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import RemedyLevel, Role
from rljob_memory.budget import Place, budget
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.constraints import PolicyGrowth
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family
from rljob_memory.recovery.state import ENGINE_PROCESSES, POLICY_PROCESSES, PROCESSES

# New processes for engines, or for the policy, whose memory grows: a leak ends with its process.
#
# Engines have been seen to keep more GPU memory after each sleep (NVIDIA-NeMo/RL 2619, vllm-project/vllm 36651); no
# setting prevents that. New engines cost their start, and no step: their weights come with the next sync. A new policy
# costs its start and a checkpoint.

_LEAKS = frozenset({FailureClass.RETAINED_GRAPH, FailureClass.HOST_MEMORY})
_HELPED_BY_FRESH_ENGINES = _LEAKS | {FailureClass.ENGINE_NOT_ASLEEP}


def _fresh_engines(case: Case) -> Change | None:
    """Expected: before a failure, the growth of the engine; after one, all memory that it kept while it slept.

    After a failure it is tried once: an engine that keeps as much from its start does not leak, and one that leaks is
    replaced before the next failure.
    """
    if case.is_preventive:
        return _ends_growth(case, "rollout")
    sleeps = case.shares_gpu and case.plan.rollout_sleep_level > 0
    tried = any(change.remedy.setting == ENGINE_PROCESSES and not change.preventive for change in case.state.changes)
    if case.failure_class is not FailureClass.ENGINE_NOT_ASLEEP or not sleeps or tried:
        return None
    return Change("fresh", case.number("other_processes_bytes"))


def _fresh_policy(case: Case) -> Change | None:
    """Only before a failure: after one, the policy starts anew whenever its processes are unusable."""
    return _ends_growth(case, "policy") if case.is_preventive else None


def _ends_growth(case: Case, role: Role) -> Change | None:
    """Expected: the growth that a process of `role` has of its own."""
    growth = case.number("own_growth_bytes") if case.role == role else None
    return Change("fresh", growth) if growth else None


FRESH_ENGINES = Family(ENGINE_PROCESSES, _HELPED_BY_FRESH_ENGINES, "RespawnRole", "rollout", _fresh_engines)
FRESH_POLICY = Family(POLICY_PROCESSES, _LEAKS, "RespawnRole", "policy", _fresh_policy)


# Memory of foreign processes on the GPU: restart the job's own processes, then leave the node.
#
# Both act on ForeignProcess and ControllerContext; no setting of the plan does. A restart of the containers ends a
# process that an earlier process of the same pod left on the GPU, so it is tried once. A process of another user stays
# on its node, which the job then leaves.

_HELD_BY_OTHERS = frozenset({FailureClass.FOREIGN_PROCESS, FailureClass.CONTROLLER_CONTEXT})
_LEVEL: RemedyLevel = "ReplacePods"
_MOST_NODES = next(
    limit.max_length for limit in MemoryPlan.model_fields["excluded_nodes"].metadata if hasattr(limit, "max_length")
)


def _fresh_processes(case: Case) -> Change | None:
    if not case.on_gpu or any(change.remedy.setting == PROCESSES for change in case.state.changes):
        return None
    return Change("fresh", _held_bytes(case))


def _excluded_nodes(case: Case) -> Change | None:
    node, excluded = case.constraints.node, case.plan.excluded_nodes
    if node is None or node in excluded or len(excluded) >= _MOST_NODES or not case.on_gpu:
        return None
    return Change([*excluded, node], _held_bytes(case))


def _only_node(case: Case) -> str | None:
    if case.constraints.node is not None or not case.on_gpu or case.constraints.available_level(_LEVEL) is None:
        return None
    return "no other node is known to have room: stop the other process on its node, or add a node"


def _held_bytes(case: Case) -> int | None:
    """Expected: all memory of the foreign processes."""
    return case.number("contexts_bytes", "other_processes_bytes")


FRESH_PROCESSES = Family(PROCESSES, _HELD_BY_OTHERS, "RestartInPlace", None, _fresh_processes)
EXCLUDED_NODES = Family("excluded_nodes", _HELD_BY_OTHERS, _LEVEL, None, _excluded_nodes, _only_node)


# GPUs of the policy: the last resort, since it costs the cluster resources and acts on no cause in particular.
#
# Weights, gradients and optimizer state are divided among the ranks, and so are the sequences of a step. The gradient
# of a step stays the same, except for the order of floating-point additions.

_NOT_OF_THE_POLICY = frozenset(
    {
        FailureClass.FOREIGN_PROCESS,
        FailureClass.CONTROLLER_CONTEXT,
        FailureClass.RETAINED_GRAPH,
        FailureClass.SHARED_MEMORY,
    }
)
"""Memory that the ranks do not divide."""


def _policy_gpus(case: Case) -> Change | None:
    """The next larger policy. Expected: the part of weights, gradients and moments
    that leaves a rank, less the buffers of a larger group."""
    growth = _growth_that_helps(case)
    if growth is None or not growth.larger or not _has_room(growth):
        return None
    ranks = growth.larger[0]
    return Change(ranks, _freed_bytes(case, growth.ranks, ranks), before=growth.ranks)


def _growth_that_helps(case: Case) -> PolicyGrowth | None:
    growth = case.constraints.growth
    if growth is None or case.role != "policy" or case.diagnosis.class_name in _NOT_OF_THE_POLICY:
        return None
    if case.diagnosis.class_name == FailureClass.HOST_MEMORY and (case.on_gpu or growth.level != "ReplacePods"):
        return None  # ranks on one machine share its host memory
    return growth.from_ranks(case.plan.policy_gpus or growth.ranks)


def _has_room(growth: PolicyGrowth) -> bool:
    return growth.room is None or growth.larger[0] <= growth.room


def _freed_bytes(case: Case, before: int, after: int) -> int | None:
    if case.setup is None:
        return None
    place: Place = "gpu" if case.on_gpu else "host"
    sizes = [budget(case.setup.with_work(policy_ranks=ranks), case.plan) for ranks in (before, after)]
    now, then = (size.total(place, "optimizer") for size in sizes)
    return max(now - then, 0)


def _bound(case: Case) -> str | None:
    growth = _growth_that_helps(case)
    if growth is None:
        return None
    if growth.larger and not _has_room(growth):
        return (
            f"the policy could grow from {growth.ranks} to {growth.larger[0]} GPUs, but this machine has only "
            f"{growth.room} for it: use one that has more, or a cluster"
        )
    if growth.larger:
        return None
    return (
        f"recovery.maxGpus is {growth.most}, and the policy has {growth.ranks} GPUs: raise it to the next power of two "
        "that divides algorithm.promptsPerStep"
    )


POLICY_GPUS = Family("policy_gpus", frozenset(), "ReplacePods", "policy", _policy_gpus, _bound)
