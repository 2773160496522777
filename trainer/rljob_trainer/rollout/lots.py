"""Partial rollouts: the rule that decides which groups a step completes, and which it leaves for the next one.

The groups that the engines hold are dealt into lots, one for each engine. A lot has a quota: the number of its groups
that the step learns from. Its responses are generated in segments of equal length. It ends with the segment in which
its quota is met: by all groups that the previous step has left, and by the first new ones. The others are left: their
responses continue in the next step, with its weights.

The outcome depends on tokens alone, not on time: neither on the speed or the order of engines, nor on the size of their
KV cache. A lot that is generated again, by any engine, has the same outcome.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rljob_memory.sample import MemorySample
from rljob_trainer.rollout_batch import Completion, PartialGroup

_SEGMENTS = 8
"""Segments of the longest response. More of them leave more, and prefill more often."""


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A group that an engine holds."""

    group: PartialGroup

    prompt_ids: Sequence[int]
    """Tokens of its prompt."""

    seed: int
    """Seed of the group, from which those of its segments are derived."""


@dataclass(frozen=True, slots=True)
class Lot:
    """The groups that one engine holds, and the number that it completes."""

    held: Sequence[HeldGroup]
    """Those that the previous step has left come first."""

    left_before: int
    """Number of those. They are always completed, so that no group is left twice."""

    quota: int
    """Number of groups to complete."""


@dataclass(frozen=True, slots=True)
class LotResult:
    """The groups of a lot, each in the order of the positions."""

    completed: list[PartialGroup]
    """Completed groups, as many as the quota."""

    left: list[PartialGroup]
    """The others. They may be complete as well."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The next part of one response."""

    token_ids: list[int]
    """Prompt, and the response so far."""

    max_tokens: int

    seed: int


def deal(left_before: Sequence[HeldGroup], new: Sequence[HeldGroup], quota: int, lots: int) -> list[Lot]:
    """The groups in `lots` lots of nearly equal sizes, whose quotas add up to `quota`.

    `left_before` are at most as many as `quota`, also in every lot. Raises `ValueError` for another quota.
    """
    held = [*left_before, *new]
    if not len(left_before) <= quota <= len(held):
        raise ValueError(f"expected a quota between {len(left_before)} and {len(held)} groups, found {quota}")
    return [Lot(held[n::lots], len(left_before[n::lots]), len(range(n, quota, lots))) for n in range(lots)]


def generate_lot(
    lot: Lot, max_tokens: int, version: int, generate: Callable[[list[Segment]], Sequence[Completion]]
) -> LotResult:
    """Generate segments until the quota of the lot is met.

    `max_tokens`: maximum in a response. `version`: the step whose weights generate. `generate`: called with the next
    segments of all unfinished responses; returns the new tokens of each.
    """
    groups = [held.group for held in lot.held]
    complete = [index for index, group in enumerate(groups) if group.is_complete(max_tokens)]
    due = set(range(lot.left_before))
    while len(complete) < lot.quota or not due <= set(complete):
        unfinished = [
            (index, member)
            for index, group in enumerate(groups)
            for member, response in enumerate(group.responses)
            if not response.is_complete(max_tokens)
        ]
        segments = [_segment(lot.held[index], groups[index], member, max_tokens) for index, member in unfinished]
        for (index, member), more in zip(unfinished, generate(segments), strict=True):
            groups[index] = _extended(groups[index], member, more, version)
        ended = [index for index, group in enumerate(groups) if group.is_complete(max_tokens)]
        complete += [index for index in ended if index not in complete]
    taken = set([*due, *(index for index in complete if index not in due)][: lot.quota])
    return LotResult(
        in_order(group for index, group in enumerate(groups) if index in taken),
        in_order(group for index, group in enumerate(groups) if index not in taken),
    )


def unstarted(position: int, group_size: int) -> PartialGroup:
    """A group without tokens."""
    return PartialGroup(position, [Completion([], [], False, "")] * group_size)


def in_order(groups: Iterable[PartialGroup]) -> list[PartialGroup]:
    """The groups by position."""
    return sorted(groups, key=lambda group: group.position)


def segment_tokens(max_tokens: int) -> int:
    """Tokens of a segment. `max_tokens`: maximum in a response."""
    return -(-max_tokens // _SEGMENTS)


def _segment(held: HeldGroup, group: PartialGroup, member: int, max_tokens: int) -> Segment:
    response = group.responses[member].token_ids
    return Segment(
        [*held.prompt_ids, *response],
        min(segment_tokens(max_tokens), max_tokens - len(response)),
        _segment_seed(held.seed, member, len(response)),
    )


def _segment_seed(seed: int, member: int, tokens: int) -> int:
    """A seed that no other segment of the group has: `tokens` is the length of the response before it."""
    digest = hashlib.sha256(f"{seed}/{member}/{tokens}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _extended(group: PartialGroup, member: int, more: Completion, version: int) -> PartialGroup:
    before = group.responses[member]
    response = Completion(
        [*before.token_ids, *more.token_ids],
        [*before.logprobs, *more.logprobs],
        more.finished,
        "",
        [*before.weights_versions, *[version] * len(more.token_ids)],
    )
    return replace(group, responses=[*group.responses[:member], response, *group.responses[member + 1 :]])


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of an evaluation that replace those of rollouts."""

    temperature: float
    """0: the likeliest token."""

    top_p: float

    max_tokens: int
    """Maximum tokens of a response."""

    top_k: int = 0
    """0: all tokens."""

    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class WholeGroups:
    """Groups to complete."""

    places: Sequence[int]
    """Place of each prompt in the step."""

    prompts: Sequence[Sequence[int]]
    """Tokens of each prompt."""

    group_size: int
    """Completions of each prompt."""

    seeds: Sequence[int]
    """Seed of each prompt."""

    sampling: Sampling | None = None
    """None: as for rollouts."""


@dataclass(frozen=True, slots=True)
class Lots:
    """Lots to complete."""

    places: Sequence[int]
    """Place of each lot among those of the step."""

    lots: Sequence[Lot]


EngineWork = WholeGroups | Lots


@dataclass(frozen=True, slots=True)
class Generated:
    """The results of one call to a process of an engine."""

    results: list[tuple[int, Any]]
    """Place and result of each group or lot that was completed: a list of completions, or a LotResult. Empty in all
    processes of an engine but the first."""

    unfinished_sequences: int
    """Sequences of groups that the engine has begun, or is about to begin, and not completed."""

    memory: MemorySample | None
    """Memory of the process, with the peaks since the engine began to generate. None if it has not finished."""
