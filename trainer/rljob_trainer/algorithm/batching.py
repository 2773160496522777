"""Which rank learns from which sequences, in which micro-batches.

Micro-batches are bounded by tokens, not by sequences: activations grow with tokens. Sequences of like length share a
micro-batch, so little is lost to padding, and padding is on the right, so causal attention needs no mask for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def plan_micro_batches(lengths: Sequence[int], ranks: int, budget_tokens: int) -> list[list[list[int]]]:
    """Indices of the sequences of each micro-batch: `plan[rank][micro_batch]`.

    `lengths`: tokens of each sequence. A micro-batch of n sequences holds n × (longest of them) ≤ `budget_tokens`
    tokens, padding included; a sequence longer than the budget is alone in one. Every rank gets the same number of
    micro-batches, at least one, since all ranks meet in the collectives of each; where a rank has fewer, empty ones
    follow. The longest come first, so that a step that does not fit into memory fails early.
    """
    packed = [_pack(share, lengths, budget_tokens) for share in _deal(lengths, ranks)]
    count = max(1, *(len(micro_batches) for micro_batches in packed))
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in packed]


def split_updates(completions: Sequence[int], updates: int) -> list[list[int]]:
    """`completions` in order, cut into `updates` parts whose sizes differ by at most one: one optimizer step each."""
    return [part.tolist() for part in np.array_split(np.asarray(completions, np.int64), updates)]


def _deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Sequences by falling length, dealt to the ranks forth and back, so that all get about the same tokens."""
    order = sorted(range(len(lengths)), key=lambda sequence: (-lengths[sequence], sequence))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, sequence in enumerate(order):
        turn, seat = divmod(place, ranks)
        shares[seat if turn % 2 == 0 else ranks - 1 - seat].append(sequence)
    return shares


def _pack(share: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Fill micro-batches one after the other. `share` is by falling length: the first of each is its longest."""
    micro_batches: list[list[int]] = []
    for sequence in share:
        if micro_batches and (len(micro_batches[-1]) + 1) * lengths[micro_batches[-1][0]] <= budget_tokens:
            micro_batches[-1].append(sequence)
        else:
            micro_batches.append([sequence])
    return micro_batches
