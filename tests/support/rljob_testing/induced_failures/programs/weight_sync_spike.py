"""The engine gets its weights as full copies, which do not fit beside the policy."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import GIB, floats, take_card
from rljob_testing.induced_failures.catalogue import induces


def policy_of(size_gib: int) -> dict[str, Tensor]:
    """Float32 weights of a policy, 1 GiB each, by name."""
    return {f"layers.{layer}.weight": floats(GIB) for layer in range(size_gib)}


def sync_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All weights in the engine's precision, at once."""
    return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}


def broadcast_to_engine(weights: dict[str, Tensor]) -> Tensor:
    """All weights in one packed tensor."""
    return torch.cat([weight.flatten() for weight in weights.values()])


@induces(FailureClass.WEIGHT_SYNC_SPIKE)
def copies_in_the_engines_precision(folder: Path) -> None:
    """Weights and two moments fit; another half of the weights does not."""
    size_gib = int(take_card().free_gib / 3.25)
    weights = policy_of(size_gib)
    moments = [floats(GIB) for _ in range(2 * size_gib)]
    sync_weights(weights)
    del moments


@induces(FailureClass.WEIGHT_SYNC_SPIKE)
def one_packed_tensor(folder: Path) -> None:
    """Weights and two moments fit; the weights a second time, in one piece, do not."""
    size_gib = int(take_card().free_gib / 3.5)
    weights = policy_of(size_gib)
    moments = [floats(GIB) for _ in range(2 * size_gib)]
    broadcast_to_engine(weights)
    del moments
