"""The division of sequences over ranks and micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from rljob_memory.budget.seconds import LEAST_SAVING

Division = list[list[list[int]]]
"""Indices of the sequences of each micro-batch: `division[rank][micro_batch]`."""

_MICRO_BATCH_COST = 32
"""Divisor of the token budget: the fixed cost of a micro-batch, in tokens. An estimate."""

_PARTS = (1, 2, 4)
"""Divisors of the token budget for the largest group of responses that stays together. Smaller ones fill micro-batches
and ranks more evenly, but repeat prompts more often."""


def plan_micro_batches(lengths: Sequence[int], ranks: int, budget_tokens: int, *, packed: bool = False) -> Division:
    """The division of sequences that have nothing in common.

    `lengths`: tokens of each sequence. A micro-batch of n sequences has n × (longest of them) ≤ `budget_tokens` tokens,
    padding included; if it is `packed`, the sum of their lengths. A sequence longer than the budget gets its own. Every
    rank gets the same number of micro-batches, at least one, because each has collectives; ranks with fewer get empty
    ones. The longest come first, so that a step that does not fit in memory fails early.
    """
    divide = _balance if packed else _divide
    of_ranks = [divide(share, lengths, budget_tokens) for share in _deal(lengths, ranks)]
    count = max(1, *(len(micro_batches) for micro_batches in of_ranks))
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in of_ranks]


def plan_with_shared_prompts(
    lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int], ranks: int, budget_tokens: int
) -> tuple[Division, bool]:
    """The division of packed sequences that takes the fewest tokens, and whether it shares prompts.

    `lengths`: tokens of each sequence; `prompts`: the first of these, which all sequences of a group have in common;
    `groups`: the group of each sequence. If prompts are shared, those of one group in one micro-batch have their prompt
    in it once. The other properties are those of `plan_micro_batches`.
    """

    def tokens(micro_batch: Sequence[int]) -> int:
        distinct = {groups[sequence]: prompts[sequence] for sequence in micro_batch}
        return sum(lengths[sequence] - prompts[sequence] for sequence in micro_batch) + sum(distinct.values())

    alone = plan_micro_batches(lengths, ranks, budget_tokens, packed=True)
    repeated = _cost(alone, lambda micro_batch: sum(lengths[sequence] for sequence in micro_batch), budget_tokens)
    shared = [alone]
    for parts in _PARTS:
        bundles = _bundles(lengths, prompts, groups, budget_tokens // parts)
        of_bundles = plan_micro_batches([tokens(bundle) for bundle in bundles], ranks, budget_tokens, packed=True)
        shared.append([[list(chain(*(bundles[i] for i in part))) for part in rank] for rank in of_bundles])
    costs = [_cost(division, tokens, budget_tokens) for division in shared]
    if min(costs) > repeated * (1 - LEAST_SAVING):
        return alone, False
    return shared[costs.index(min(costs))], True


def _cost(division: Division, tokens: Callable[[Sequence[int]], int], budget_tokens: int) -> int:
    """Tokens that the ranks process one after the other, where all wait for the slowest in each micro-batch."""
    fixed = max(budget_tokens // _MICRO_BATCH_COST, 1)
    return sum(max(map(tokens, of_ranks)) + fixed for of_ranks in zip(*division, strict=True))


def _bundles(
    lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int], limit_tokens: int
) -> list[list[int]]:
    """Parts of the groups, each with at most `limit_tokens` tokens and its prompt once, or with one sequence."""
    members: dict[int, list[int]] = {}
    for sequence in sorted(range(len(lengths)), key=lambda sequence: (-lengths[sequence], sequence)):
        members.setdefault(groups[sequence], []).append(sequence)
    after = [max(length - prompt, 1) for length, prompt in zip(lengths, prompts, strict=True)]
    return [
        bundle
        for group in members.values()
        for bundle in _balance(group, after, max(limit_tokens - prompts[group[0]], 1))
    ]


def _deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal the sequences to the ranks by decreasing length, back and forth, so that all get about the same number of
    tokens."""
    order = sorted(range(len(lengths)), key=lambda sequence: (-lengths[sequence], sequence))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, sequence in enumerate(order):
        turn, seat = divmod(place, ranks)
        shares[seat if turn % 2 == 0 else ranks - 1 - seat].append(sequence)
    return shares


def _balance(share: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Divide `share`, which has decreasing lengths, into few micro-batches with about the same number of tokens.

    Each sequence goes to the micro-batch with the fewest tokens so far.
    """
    least = -(-sum(lengths[sequence] for sequence in share) // budget_tokens)
    for count in range(least, len(share) + 1):
        micro_batches: list[list[int]] = [[] for _ in range(count)]
        filled = [(0, place) for place in range(count)]
        for sequence in share:
            tokens, place = heapq.heappop(filled)
            micro_batches[place].append(sequence)
            heapq.heappush(filled, (tokens + lengths[sequence], place))
        if all(tokens <= budget_tokens or len(micro_batches[place]) == 1 for tokens, place in filled):
            return micro_batches
    return [[sequence] for sequence in share]


def _divide(share: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Divide `share`, which has decreasing lengths, into micro-batches with little padding.

    Of all divisions in order, this is the one with the fewest tokens, padding included, where each micro-batch counts
    as a few tokens more for its launches and collectives. One with a single sequence counts as a full one more if two
    of that length would fit, since torch.compile compiles the layers once more for one row (16 s on an H200). Of equal
    divisions, it is the most even one. Dynamic programming over the number of sequences divided.
    """
    of_share = np.asarray([lengths[sequence] for sequence in share], np.int64)
    fixed = max(budget_tokens // _MICRO_BATCH_COST, 1)
    cost = np.zeros(len(share) + 1, np.int64)
    unevenness = np.zeros(len(share) + 1)
    starts = np.zeros(len(share) + 1, np.int64)
    for stop in range(1, len(share) + 1):
        tokens = np.arange(stop, 0, -1) * of_share[:stop]
        allowed = tokens <= budget_tokens
        allowed[stop - 1] = True  # a single sequence, of any length
        total = np.where(allowed, cost[:stop] + tokens + fixed, np.iinfo(np.int64).max)
        if 2 * of_share[stop - 1] <= budget_tokens:
            total[stop - 1] += budget_tokens
        uneven = np.where(total == total.min(), unevenness[:stop] + np.square(tokens, dtype=np.float64), np.inf)
        starts[stop] = start = uneven.argmin()
        cost[stop], unevenness[stop] = total[start], uneven[start]
    micro_batches: list[list[int]] = []
    stop = len(share)
    while stop:
        micro_batches.append(list(share[starts[stop] : stop]))
        stop = int(starts[stop])
    return micro_batches[::-1]
