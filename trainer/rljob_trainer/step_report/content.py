"""The contents of a StepReport, from the records of the loop. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rljob_api.plan_change import Phase, Role
from rljob_api.step_report import MAX_RANKS_REPORTED, PhaseSeconds, RankMemory
from rljob_client.run_directory.records import StepRecord
from rljob_memory.sample import MemorySample

_REPORTED_NUMBERS = tuple(RankMemory.model_fields.keys() - {"role", "rank", "phase"})
_ROLES: dict[str, Role] = {"policy": "policy", "rollout": "rollout"}


def reward_of(record: StepRecord) -> float | None:
    """The mean reward; None if it is not finite, which JSON cannot express."""
    return record.reward.mean if math.isfinite(record.reward.mean) else None


def seconds_of(record: StepRecord) -> PhaseSeconds:
    return PhaseSeconds.model_validate(record.seconds)


def rank_memory(role: Role, rank: int, phase: Phase, sample: MemorySample) -> RankMemory:
    """A sample in the form of the API."""
    return RankMemory(role=role, rank=rank, phase=phase, **{name: getattr(sample, name) for name in _REPORTED_NUMBERS})


def memory_of_ranks(memory: Mapping[str, Mapping[Phase, MemorySample]]) -> list[RankMemory]:
    """One entry per process and phase: at most 256, those with the least free memory."""
    entries = [
        rank_memory(*role_and_rank(actor), phase, sample)
        for actor, phases in memory.items()
        for phase, sample in phases.items()
    ]
    if len(entries) <= MAX_RANKS_REPORTED:
        return entries
    return sorted(entries, key=lambda entry: (entry.device_free_bytes, -entry.peak_rss_bytes))[:MAX_RANKS_REPORTED]


def role_and_rank(actor: str | None) -> tuple[Role, int]:
    """("policy", 1) for "policy-1"; ("controller", 0) for None, since the controller is not an actor."""
    if actor is None:
        return "controller", 0
    name, _, rank = actor.rpartition("-")
    return _ROLES[name], int(rank)
