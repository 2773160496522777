"""The one place where metrics of an update are kept. They stay on the device and cross to the host once, at the end."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_trainer.algorithm.loss import LossMetrics


class UpdateMetrics:
    """Adds up the metrics of micro-batches, then of ranks. It refuses tensors with gradient: those hold a whole
    graph."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, part: LossMetrics) -> None:
        for name, value in part.sums.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + _detached(name, value)
        for name, value in part.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima.get(name, value), _detached(name, value))

    def over_ranks(self, updates: int) -> dict[str, float]:
        """Sums over all ranks, as means over the step's `updates`, and maxima. Every rank has added the same names."""
        sums, maxima = torch.stack(list(self._sums.values())), torch.stack(list(self._maxima.values()))
        dist.all_reduce(sums, dist.ReduceOp.SUM)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        values = torch.cat([sums / updates, maxima]).tolist()
        return dict(zip([*self._sums, *self._maxima], values, strict=True))


def _detached(name: str, value: Tensor) -> Tensor:
    if value.requires_grad:
        raise ValueError(
            f"expected the metric {name} without gradient, found one that keeps its graph alive; detach it"
        )
    return value
