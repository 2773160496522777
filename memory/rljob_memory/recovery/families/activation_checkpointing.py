"""Activation checkpointing: each layer keeps its input alone and computes the rest again in the backward pass.

Acts on ActivationSpike. Costs about a third more time of an update (Chen et al. 2016, one forward pass more).
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family


def _next_change(case: Case) -> Change | None:
    """Expected: the tokens of a full micro-batch times the activation bytes that a token no longer keeps."""
    if case.plan.activation_checkpointing or not case.in_update:
        return None
    profile = case.profile
    expected = None
    if profile:
        saved = profile.activation_bytes_per_token - profile.checkpointed_activation_bytes_per_token
        tokens = min(case.plan.micro_batch_tokens, profile.rank_tokens or case.plan.micro_batch_tokens)
        expected = tokens * max(saved, 0)
    return Change(True, expected)


ACTIVATION_CHECKPOINTING = Family(
    "activation_checkpointing",
    frozenset({FailureClass.ACTIVATION_SPIKE, FailureClass.UNKNOWN}),
    "RespawnRole",
    "policy",
    _next_change,
)
