"""Next values of the settings that remedies change: pure functions of a failure, used by the table (`remedies`).

They return None if the setting can do nothing about the failure, or nothing more.
"""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.memory_failure import Activity
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import Role
from rljob_memory.budget import Phase, others
from rljob_memory.budget.gpu import (
    SMALLEST_BUCKET_BYTES,
    SMALLEST_KV_CACHE_BYTES,
    filled_chunk_tokens,
    filled_tokens,
    is_of_logits,
    smallest_kv_cache_bytes,
)
from rljob_memory.diagnosis import FailureClass as Class
from rljob_memory.evidence.activity import activity_of
from rljob_memory.plan_settings import name_of
from rljob_memory.recovery.constraints import PolicyGrowth
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.state import ENGINE_PROCESSES, PROCESSES
from rljob_memory.sizes import MIB


def to(value: object, condition: Callable[[Case], bool]) -> Callable[[Case], object]:
    """A setting that takes one value, under a condition."""
    return lambda case: value if condition(case) else None


def number(*names: str) -> Callable[[Case], int | None]:
    return lambda case: case.number(*names)


# --- the allocator of the policy; vLLM's sleep mode has a pool of its own ---


def growth(case: Case) -> int | None:
    first, last = case.number("allocated_first_bytes"), case.number("allocated_last_bytes")
    return None if first is None or last is None or last <= first else last - first


def detached(case: Case) -> bool | None:
    return None if case.role == "controller" else True


def cache_is_in_the_way(case: Case) -> bool:
    """torch's allocator empties its own cache before it fails, so that emptying it helps other processes only."""
    of_the_engine = case.failure_class in (Class.KV_CACHE_OVERSIZED, Class.WEIGHT_SYNC_SPIKE)
    return case.shares_gpu and case.role in (("rollout",) if of_the_engine else ("policy", "rollout"))


def segments_help(case: Case) -> bool:
    """The segments make a cache that can be released, and release nothing themselves."""
    released = case.plan.empty_cache or case.failure_class is not Class.ALLOCATOR_CACHE
    return released and case.role != "controller" and case.on_policys_gpu


def unused_by_the_policy(case: Case) -> int | None:
    """Return the unused memory of torch, whose numbers in the message of an engine are the engine's own."""
    own = () if case.role == "rollout" else ("reserved_but_unallocated_bytes",)
    return case.number(*own, "policy_cache_bytes")


# --- sizes of an update ---


def fewer_tokens(case: Case) -> int | None:
    """Half as many, down to the longest sequence, which is never split."""
    setup, tokens = case.setup, case.plan.micro_batch_tokens
    if setup is not None:
        tokens = min(tokens, filled_tokens(setup.work, case.plan))
    after = max(tokens // 2, setup.work.max_sequence_tokens if setup else 1)
    return after if case.in_micro_batch and after < tokens else None


_SMALLEST_CHUNK_TOKENS = 64


def smaller_chunk(case: Case) -> int | None:
    """A quarter, down to 64 tokens, and only if the failed request was one for logits."""
    plan, setup = case.plan, case.setup
    tokens = filled_chunk_tokens(setup.work, plan) if setup else min(plan.logprob_chunk_tokens, plan.micro_batch_tokens)
    after = max(tokens // 4, min(tokens, _SMALLEST_CHUNK_TOKENS))
    return after if case.in_micro_batch and after < tokens and _asked_for_logits(case, tokens) else None


def _asked_for_logits(case: Case, tokens: int) -> bool:
    activity, requested = activity_of(case.message.splitlines()), case.number("requested_bytes")
    if activity is not None or requested is None or case.setup is None:
        return activity is Activity.LOGITS
    return is_of_logits(requested, case.setup.model, tokens)


# --- the weight sync ---


def smaller_bucket(case: Case) -> int | None:
    """Half, down to the largest parameter, which is sent whole.

    None if less than an eighth of the bucket is left to free: the first plan's bucket is that of the largest parameter,
    rounded up. In shared memory there are weights on a CPU only. Another trainer does not report the phase.
    """
    before, setup = case.plan.sync_bucket_bytes, case.setup
    if setup:
        before = min(before, setup.model.weight_bytes)
    least = setup.model.largest_parameter_bytes if setup else others.SMALLEST_BUCKET_BYTES
    after = max(before // 2, least, SMALLEST_BUCKET_BYTES)
    in_sync = case.phase == "sync" or (setup is None and case.failure_class is Class.WEIGHT_SYNC_SPIKE)
    through_gpus = case.failure_class is Class.SHARED_MEMORY and case.on_gpu
    return after if in_sync and not through_gpus and after <= before - before // 8 else None


# --- the engine ---

_LEAST_SHRINK = 0.25
_MARGIN = 1.05


def kv_cache(case: Case) -> int | None:
    """Smaller by the missing memory, at least by a quarter, down to the cache of one sequence; in whole MiB.

    Larger if vLLM reports that the longest sequence does not fit. That happens once: between a cache that was too small
    and one that is too large, no failure shows the right size.
    """
    before = case.plan.kv_cache_bytes
    if needed := case.number("needed_bytes"):
        may_grow = case.role == "rollout" and not case.has_changed(name_of("kv_cache_bytes"))
        return max(-(-needed // MIB) * MIB, before) if may_grow else None
    if not _kv_cache_is_in_the_way(case):
        return None
    smallest = smallest_kv_cache_bytes(case.setup.work, case.setup.model) if case.setup else SMALLEST_KV_CACHE_BYTES
    wanted = before - max(_missing_of_the_cache(case, before), int(before * _LEAST_SHRINK))
    after = -(-max(wanted, smallest) // MIB) * MIB
    return after if after < before else None


def _missing_of_the_cache(case: Case, before: int) -> int:
    """The size of another trainer's cache is unknown: of the plan's, the part that its engine's whole share lacked,
    and a little more, because it rounds shares."""
    need = case.need_bytes or 0
    if case.setup is not None:
        return need
    share = case.number("wanted_bytes")
    return int(before * _MARGIN * need / share) if share else 0


def _kv_cache_is_in_the_way(case: Case) -> bool:
    if not case.on_gpu:
        return case.role != "controller" and case.setup is not None  # another trainer's engine is on GPUs
    return case.role == "rollout" or (case.role == "policy" and case.shares_gpu and case.kv_cache_is_awake)


def will_grow_in(role: Role) -> Callable[[Case], bool]:
    """True before a failure of a process of `role` whose memory grows without a known reason."""
    return lambda case: case.is_preventive and case.role == role and bool(case.number("own_growth_bytes"))


def engine_kept_memory(case: Case) -> bool:
    """Tried once: an engine that keeps as much from its start does not leak, and one that leaks is replaced before the
    next failure."""
    sleeps = case.shares_gpu and case.plan.rollout_sleep_level > 0
    return not case.is_preventive and sleeps and not case.has_changed(ENGINE_PROCESSES)


# --- offload ---


def weights_can_wait(case: Case) -> bool:
    """The engine that failed had its KV cache. In a sync, it has one only once it has received the weights; it is not
    in the way if it is too small for one sequence."""
    if case.setup is None or not case.on_gpu or case.role != "rollout":
        return False
    if case.phase == "update" or case.number("needed_bytes"):
        return False
    return case.phase != "sync" or case.failure_class is Class.KV_CACHE_OVERSIZED


_SHARES = (0.25, 0.5, 0.75, 1.0)


def state_to_host(case: Case) -> float | None:
    """The least share of the optimizer's state that covers the need, else all that the host has room for.

    The sizes of another trainer are unknown; verl brings the state back for the whole update.
    """
    if case.setup is None:
        outside = case.failure_class in (Class.KV_CACHE_OVERSIZED, Class.WEIGHT_SYNC_SPIKE)
        return 1.0 if case.on_policys_gpu and outside and case.constraints.supported_settings is not None else None
    phase: Phase = "optimizer" if case.in_optimizer_step else "update"
    return _share(case, [share for share in _SHARES if share > case.plan.optimizer_offload], phase)


def state_to_gpu(case: Case) -> float | None:
    """The largest share that covers the need, else as little as the GPU has room for the rest of the state."""
    shares = (share for share in (*_SHARES[::-1], 0.0) if share < case.plan.optimizer_offload)
    return None if case.setup is None else _share(case, list(shares), "update")


def _share(case: Case, shares: list[float], phase: Phase) -> float | None:
    setting, need = "optimizer_offload", case.need_bytes
    possible = [share for share in shares if case.on_policys_gpu and case.has_room_for(setting, share, phase)]
    enough = [share for share in possible if need and (case.freed_bytes({setting: share}, phase) or 0) >= need]
    return next(iter(enough or possible[-1:]), None)


# --- other processes, other nodes, more GPUs ---

_MOST_NODES = next(
    limit.max_length for limit in MemoryPlan.model_fields["excluded_nodes"].metadata if hasattr(limit, "max_length")
)


held_by_others = number("contexts_bytes", "other_processes_bytes")


def fresh_once(case: Case) -> str | None:
    return "fresh" if case.on_gpu and not case.has_changed(PROCESSES) else None


def without_this_node(case: Case) -> list[str] | None:
    node, excluded = case.constraints.node, case.plan.excluded_nodes
    if node is None or node in excluded or len(excluded) >= _MOST_NODES or not case.on_gpu:
        return None
    return [*excluded, node]


def only_node(case: Case) -> str | None:
    if case.constraints.node is not None or not case.on_gpu or not case.constraints.can_replace_pods:
        return None
    return "no other node is known to have room: stop the other process on its node, or add a node"


_NOT_OF_THE_POLICY = frozenset(
    {Class.FOREIGN_PROCESS, Class.CONTROLLER_CONTEXT, Class.RETAINED_GRAPH, Class.SHARED_MEMORY}
)
"""Memory that the ranks do not divide."""


def _growth_that_helps(case: Case) -> PolicyGrowth | None:
    growth = case.constraints.growth
    if growth is None or case.role != "policy" or case.diagnosis.class_name in _NOT_OF_THE_POLICY:
        return None
    if case.diagnosis.class_name == Class.HOST_MEMORY and (case.on_gpu or growth.level != "ReplacePods"):
        return None  # ranks on one machine share its host memory
    return growth.from_ranks(case.plan.policy_gpus or growth.ranks)


def _has_room(growth: PolicyGrowth) -> bool:
    return growth.room is None or growth.larger[0] <= growth.room


def larger_policy(case: Case) -> int | None:
    growth = _growth_that_helps(case)
    return growth.larger[0] if growth and growth.larger and _has_room(growth) else None


def ranks(case: Case) -> int | None:
    growth = case.constraints.growth
    return case.plan.policy_gpus or (growth.ranks if growth else None)


def bound_of_growth(case: Case) -> str | None:
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
