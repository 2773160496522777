"""Remedies for the GPU memory of the policy: its update, its allocator, and the weights that it sends."""

from __future__ import annotations

from rljob_api.memory_failure import Activity
from rljob_memory.budget import Phase as BudgetPhase
from rljob_memory.budget import Place, budget
from rljob_memory.budget.gpu import engine_sleeps, filled_chunk_tokens, filled_tokens
from rljob_memory.budget.host import host_holds
from rljob_memory.diagnosis import FailureClass
from rljob_memory.evidence.activity import activity_of
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family

# Detached metrics: values kept for logging no longer hold the autograd graph of their micro-batch. Costs nothing.
#
# The only remedy for RetainedGraph: smaller micro-batches and activation checkpointing shrink the retained graphs, and
# so only delay the failure (Fast-LLM 486, verl 6699).


def _detach_metrics(case: Case) -> Change | None:
    """Expected: the growth of the memory in tensors over the observed steps."""
    if case.plan.detach_metrics or case.role == "controller":
        return None
    first, last = case.number("allocated_first_bytes"), case.number("allocated_last_bytes")
    grown = None if first is None or last is None else max(last - first, 0)
    return Change(True, grown)


DETACH_METRICS = Family("detach_metrics", frozenset({FailureClass.RETAINED_GRAPH}), "Live", "policy", _detach_metrics)


# The policy's caching allocator: release the cache after an update, and use expandable segments.
#
# Both act on memory that torch holds without using it. `empty_cache` releases whole free blocks to other processes on
# the GPU, once per update (about 80 ms). Expandable segments leave hardly any partly used block, at no measurable cost.
# Neither helps the engine's own allocator: vLLM's sleep mode has its own pool.

_OF_THE_CACHE = frozenset({FailureClass.ALLOCATOR_CACHE, FailureClass.UNKNOWN})
_OF_THE_ENGINE = frozenset({FailureClass.KV_CACHE_OVERSIZED, FailureClass.WEIGHT_SYNC_SPIKE})
_CACHE_NUMBERS = {
    "policy": ("reserved_but_unallocated_bytes", "policy_cache_bytes"),
    "rollout": ("policy_cache_bytes",),  # torch's numbers in the engine's message are the engine's own
}


def _empty_cache(case: Case) -> Change | None:
    """Expected: the policy's cache, as last sampled. It helps other processes only: torch's allocator empties its own
    cache before it fails.
    """
    if case.plan.empty_cache or not case.shares_gpu or not _of_policys_allocator(case):
        return None
    if case.failure_class in _OF_THE_ENGINE and case.role != "rollout":
        return None
    return Change(True, case.number("policy_cache_bytes"))


def _expandable_segments(case: Case) -> Change | None:
    """Expected: memory that is reserved and in no tensor. The segments make a cache that can be released, and release
    nothing themselves: against AllocatorCache they help only if the cache is emptied.
    """
    if case.plan.expandable_segments or not _of_policys_allocator(case):
        return None
    if case.failure_class is FailureClass.ALLOCATOR_CACHE and not case.plan.empty_cache:
        return None
    cached = case.number(*_CACHE_NUMBERS[case.role])
    return Change(True, cached)


def _of_policys_allocator(case: Case) -> bool:
    return case.on_gpu and (case.role == "policy" or (case.role == "rollout" and case.shares_gpu))


EMPTY_CACHE = Family("empty_cache", _OF_THE_CACHE | _OF_THE_ENGINE, "Live", "policy", _empty_cache)
EXPANDABLE_SEGMENTS = Family(
    "expandable_segments", _OF_THE_CACHE | {FailureClass.FRAGMENTATION}, "Live", "policy", _expandable_segments
)


# Tokens per micro-batch, and tokens whose logits exist at a time.
#
# Both act on ActivationSpike, whose peak is linear in both, and on Fragmentation, since the largest allocation shrinks
# with them. Smaller micro-batches cost throughput; smaller chunks of logits cost next to nothing. Neither changes the
# result of an update, except for the order of floating-point additions.

_SHRINKS_WITH_TOKENS = frozenset({FailureClass.ACTIVATION_SPIKE, FailureClass.FRAGMENTATION, FailureClass.UNKNOWN})
_SMALLEST_CHUNK_TOKENS = 64
_LOGIT_BYTES = 4
_OF_THE_SIZE_OF_LOGITS = (0.4, 2.2)
"""Size of a request relative to a chunk's float32 logits: 0.5 in 16 bits, 2 for logits and a copy at once."""


def _micro_batch(case: Case) -> Change | None:
    """Half as many tokens, down to the longest sequence, which is never split.

    Expected: the activations and logits of the removed tokens, as far as the update had come.
    """
    setup, tokens = case.setup, case.plan.micro_batch_tokens
    if setup is not None:
        tokens = min(tokens, filled_tokens(setup.work, case.plan))
    after = max(tokens // 2, setup.work.max_sequence_tokens if setup else 1)
    if not case.in_micro_batch or after >= tokens:
        return None
    return Change(after, _seen_at_most(case, micro_batch_tokens=after))


def _logprob_chunk(case: Case) -> Change | None:
    """A quarter of the tokens, down to 64, and only if the failed request was one for logits.

    Expected: the logits of the removed tokens, with their gradients, as far as the update had come.
    """
    plan = case.plan
    at_once = min(plan.logprob_chunk_tokens, plan.micro_batch_tokens)
    if case.setup is not None:
        at_once = filled_chunk_tokens(case.setup.work, plan)
    after = max(at_once // 4, min(at_once, _SMALLEST_CHUNK_TOKENS))
    if not case.in_micro_batch or after >= at_once or not _asked_for_logits(case, at_once):
        return None
    return Change(after, _seen_at_most(case, logprob_chunk_tokens=after))


def _seen_at_most(case: Case, **after: int) -> int | None:
    """Memory that the change frees in an update, or less if the update failed before its peak; None if it is unknown.

    Then the visible effect is at most the memory in use plus the failed request, less the need `after` the change; but
    at least half of the request.
    """
    saved = case.freed_bytes(dict(after), "update")
    allocated, requested = case.number("allocated_bytes"), case.number("requested_bytes")
    if case.setup is None or saved is None or allocated is None or requested is None or not case.on_gpu:
        return saved
    needed = budget(case.setup, case.plan.model_copy(update=after)).in_torch("policy", "update")
    return min(saved, max(allocated + requested - needed, requested // 2))


def _asked_for_logits(case: Case, tokens: int) -> bool:
    activity = activity_of(case.message.splitlines())
    if activity is not None:
        return activity is Activity.LOGITS
    requested = case.number("requested_bytes")
    if requested is None or case.setup is None:
        return False
    least, most = _OF_THE_SIZE_OF_LOGITS
    logits_bytes = tokens * _LOGIT_BYTES * case.setup.model.vocabulary
    return least * logits_bytes <= requested <= most * logits_bytes


MICRO_BATCH = Family("micro_batch_tokens", _SHRINKS_WITH_TOKENS, "Live", "policy", _micro_batch)
LOGPROB_CHUNK = Family("logprob_chunk_tokens", _SHRINKS_WITH_TOKENS, "Live", "policy", _logprob_chunk)


# Activation checkpointing: each layer keeps its input alone and computes the rest again in the backward pass.
#
# Acts on ActivationSpike. Costs about a third more time of an update (Chen et al. 2016, one forward pass more).


def _activation_checkpointing(case: Case) -> Change | None:
    """Expected: the tokens of a full micro-batch times the activation bytes that a token no longer keeps."""
    if case.plan.activation_checkpointing or not case.in_update:
        return None
    freed = case.freed_bytes({"activation_checkpointing": True}, "update")
    return Change(True, None if freed is None else max(freed, 0))


ACTIVATION_CHECKPOINTING = Family(
    "activation_checkpointing",
    frozenset({FailureClass.ACTIVATION_SPIKE, FailureClass.UNKNOWN}),
    "RespawnRole",
    "policy",
    _activation_checkpointing,
)


# Policy offload: the weights of the policy are in host memory while the engine on the same GPU generates. Costs a copy
# each way per step.
#
# Acts on failures of an engine that starts, wakes its KV cache or generates, if the host can hold the weights. It frees
# nothing in an update or while weights are sent: the policy needs them there.

_HELPED_BY_POLICY_OFFLOAD = frozenset(
    {FailureClass.KV_CACHE_OVERSIZED, FailureClass.ACTIVATION_SPIKE, FailureClass.UNKNOWN}
)


def _policy_offload(case: Case) -> Change | None:
    """Expected: the weights of one rank."""
    setup, plan = case.setup, case.plan
    if setup is None or plan.policy_offload or not case.on_gpu or not engine_sleeps(setup.work, plan):
        return None
    if not _engine_had_its_kv_cache(case) or not host_holds(setup, plan.model_copy(update={"policy_offload": True})):
        return None
    return Change(True, case.freed_bytes({"policy_offload": True}, "rollout"))


def _engine_had_its_kv_cache(case: Case) -> bool:
    """In a sync, the engine has its KV cache only once it has received the weights."""
    if case.role != "rollout" or case.phase == "update" or case.number("needed_bytes"):
        return False  # the last: the KV cache as planned is too small for one sequence
    return case.phase != "sync" or case.failure_class is FailureClass.KV_CACHE_OVERSIZED


POLICY_OFFLOAD = Family("policy_offload", _HELPED_BY_POLICY_OFFLOAD, "Live", "policy", _policy_offload)


# Optimizer offload: the optimizer's state is in host memory, and streams through the GPU in an optimizer step. Costs
# a copy each way per update.
#
# Acts on failures outside the optimizer step (KVCacheOversized, WeightSyncSpike), on OptimizerState and on
# ActivationSpike, if the host can hold the state. In the other direction it acts on HostMemory, if the GPU can hold the
# state.

_HELPED_BY_OPTIMIZER_OFFLOAD = frozenset(
    {
        FailureClass.OPTIMIZER_STATE,
        FailureClass.ACTIVATION_SPIKE,
        FailureClass.KV_CACHE_OVERSIZED,
        FailureClass.WEIGHT_SYNC_SPIKE,
        FailureClass.HOST_MEMORY,
        FailureClass.UNKNOWN,
    }
)
_OUTSIDE_THE_UPDATE = frozenset({FailureClass.KV_CACHE_OVERSIZED, FailureClass.WEIGHT_SYNC_SPIKE})


_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def _optimizer_offload(case: Case) -> Change | None:
    """The least share that covers the need; without a known need, or if none does, all that there is room for.

    Expected: the part of one rank's state that moves from one memory to the other; less the buckets that are on the GPU
    during an optimizer step, if one failed. A state that is no larger than these, such as that of adapters, stays.
    The sizes of another trainer are unknown; verl brings the state back for the whole update."""
    setup, offloaded = case.setup, case.plan.optimizer_offload
    if not case.on_gpu or not (case.role == "policy" or case.shares_gpu):
        return None
    if setup is None:
        is_read = case.constraints.supported_settings is not None
        helps = is_read and not offloaded and case.failure_class in _OUTSIDE_THE_UPDATE
        return Change(1.0, None) if helps else None

    def freed(share: float, phase: BudgetPhase, place: Place = "gpu") -> int:
        return case.freed_bytes({"optimizer_offload": share}, phase, place) or 0

    if case.failure_class is FailureClass.HOST_MEMORY:
        free = case.device_free_bytes or 0
        lower = [each for each in reversed(_SHARES) if each < offloaded and -freed(each, "update") <= free]
        changes = [Change(each, freed(each, "rollout", "host")) for each in lower]
    else:
        phase: BudgetPhase = "optimizer" if case.diagnosis.class_name == FailureClass.OPTIMIZER_STATE else "sync"
        plans = {each: case.plan.model_copy(update={"optimizer_offload": each}) for each in _SHARES if each > offloaded}
        changes = [Change(each, freed(each, phase)) for each, plan in plans.items() if host_holds(setup, plan)]
    need = case.need_bytes
    enough = [each for each in changes if need and each.expected_bytes and each.expected_bytes >= need]
    change = next(iter(enough or changes[-1:]), None)
    return change if change and change.expected_bytes and change.expected_bytes > 0 else None


OPTIMIZER_OFFLOAD = Family(
    "optimizer_offload", _HELPED_BY_OPTIMIZER_OFFLOAD, "RespawnRole", "policy", _optimizer_offload
)
