"""Enough memory is reserved and free, but in pieces that are too small: classic segments and varying lengths."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import gib, take_card
from rljob_testing.induced_failures.catalogue import induces

LONGEST_GIB = 8
CLASSIC_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}


@induces(FailureClass.FRAGMENTATION, variables=CLASSIC_SEGMENTS)
def results_kept_between_batches(folder: Path) -> None:
    """No segment can be freed, and none holds the longest batch.

    The first batches are the longest and leave large segments in the cache. Each later batch splits a segment, and its
    result, which is kept, lies in the other part.
    """
    batches = int(take_card().free_gib // LONGEST_GIB)
    longest = [gib(LONGEST_GIB) for _ in range(batches)]
    del longest
    results = []
    for batch in range(batches):
        activations = gib(5 + batch / batches)
        results.append(gib(1.6))
        del activations
    longest = [gib(LONGEST_GIB) for _ in range(batches)]
    del longest


@induces(FailureClass.FRAGMENTATION, variables=CLASSIC_SEGMENTS)
def caches_grown_by_concatenation(folder: Path) -> None:
    """Conversations of random length, each with a cache that is copied into a larger one as it grows."""
    conversations = int(take_card().free_gib * 28 / 139)
    lengths = random.Random(0)
    caches: dict[int, torch.Tensor] = {}
    for _ in range(300_000):
        conversation = lengths.randrange(conversations)
        cache = caches.pop(conversation, None)
        size_gib = 0.0 if cache is None else cache.numel() / 2**30
        if size_gib <= lengths.uniform(4, 9):
            caches[conversation] = gib(size_gib + lengths.uniform(0.1, 0.6))
