"""Tokens per micro-batch, and tokens whose logits exist at a time.

Both act on ActivationSpike, whose peak is linear in both, and on Fragmentation, since the largest allocation shrinks
with them. Smaller micro-batches cost throughput; smaller chunks of logits cost next to nothing. Neither changes the
result of an update, except for the order of floating-point additions.
"""

from __future__ import annotations

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_memory.diagnosis import FailureClass
from rljob_memory.evidence.activity import Activity, activity_of
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family

_ACTS_ON = frozenset({FailureClass.ACTIVATION_SPIKE, FailureClass.FRAGMENTATION, FailureClass.UNKNOWN})
_SMALLEST_CHUNK_TOKENS = 64
_LOGIT_BYTES = 4
_OF_THE_SIZE_OF_LOGITS = (0.4, 2.2)
"""Size of a request relative to a chunk's float32 logits: 0.5 in 16 bits, 2 for logits and a copy at once."""


def _micro_batch(case: Case) -> Change | None:
    """Half as many tokens, down to the longest sequence, which is never split.

    Expected: activations that the forward pass keeps of the removed tokens (`estimate.activation_bytes_per_token`), as
    far as the update had come.
    """
    tokens, profile = _filled(case, case.plan.micro_batch_tokens), case.profile
    after = max(tokens // 2, profile.longest_sequence_tokens if profile else 1)
    if not case.in_micro_batch or after >= tokens:
        return None
    if profile is None:
        return Change(after, None)
    saved = (tokens - after) * _activation_bytes_per_token(case.plan, profile)
    return Change(after, _seen_at_most(case, profile, saved, micro_batch_tokens=after))


def _logprob_chunk(case: Case) -> Change | None:
    """A quarter of the tokens, down to 64, and only if the failed request was one for logits.

    Expected: the logits of the removed tokens, with their softmax and gradient (`estimate.logprob_bytes_per_token`), as
    far as the update had come.
    """
    at_once = _filled(case, min(case.plan.logprob_chunk_tokens, case.plan.micro_batch_tokens))
    after = max(at_once // 4, min(at_once, _SMALLEST_CHUNK_TOKENS))
    if not case.in_micro_batch or after >= at_once or not _asked_for_logits(case, at_once):
        return None
    if case.profile is None:
        return Change(after, None)
    saved = (at_once - after) * case.profile.logits_bytes_per_token
    return Change(after, _seen_at_most(case, case.profile, saved, logprob_chunk_tokens=after))


def _filled(case: Case, tokens: int) -> int:
    """A budget of `tokens`, as far as there are so many in a step: beyond that, a smaller one changes nothing."""
    return min(tokens, case.profile.rank_tokens) if case.profile and case.profile.rank_tokens else tokens


def _seen_at_most(case: Case, profile: MemoryProfile, saved_bytes: int, **after: int) -> int:
    """`saved_bytes`, or less if the update failed before its peak.

    Then the visible effect is at most the memory in use plus the failed request, less the need `after` the change; but
    at least half of the request.
    """
    allocated, requested = case.number("allocated_bytes"), case.number("requested_bytes")
    if allocated is None or requested is None:
        return saved_bytes
    needed = _update_bytes(case.plan.model_copy(update=after), profile)
    return min(saved_bytes, max(allocated + requested - needed, requested // 2))


def _update_bytes(plan: MemoryPlan, profile: MemoryProfile) -> int:
    """Peak of an update: weights and gradients, the optimizer's state unless it is offloaded, activations of a
    micro-batch, and the logits of a chunk."""
    tokens = min(plan.micro_batch_tokens, profile.rank_tokens or plan.micro_batch_tokens)
    chunk_tokens = min(plan.logprob_chunk_tokens, tokens)
    state = profile.trained_bytes or profile.optimizer_bytes
    state += 0 if plan.optimizer_offload else profile.optimizer_bytes
    return state + tokens * _activation_bytes_per_token(plan, profile) + chunk_tokens * profile.logits_bytes_per_token


def _activation_bytes_per_token(plan: MemoryPlan, profile: MemoryProfile) -> int:
    if plan.activation_checkpointing:
        return profile.checkpointed_activation_bytes_per_token
    return profile.activation_bytes_per_token


def _asked_for_logits(case: Case, tokens: int) -> bool:
    activity = activity_of(case.message.splitlines())
    if activity is not None:
        return activity is Activity.LOGITS
    requested = case.number("requested_bytes")
    if requested is None or case.profile is None or not case.profile.vocabulary:
        return False
    least, most = _OF_THE_SIZE_OF_LOGITS
    logits_bytes = tokens * _LOGIT_BYTES * case.profile.vocabulary
    return least * logits_bytes <= requested <= most * logits_bytes


MICRO_BATCH = Family("micro_batch_tokens", _ACTS_ON, "Live", "policy", _micro_batch)
LOGPROB_CHUNK = Family("logprob_chunk_tokens", _ACTS_ON, "Live", "policy", _logprob_chunk)
