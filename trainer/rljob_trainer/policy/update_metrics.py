"""The one place where metrics of an update are kept. They stay on the device and cross to the host once, at the end."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_trainer.algorithm.loss import LossMetrics


class UpdateMetrics:
    """Adds up the metrics of micro-batches, then of ranks.

    `detached`: it refuses tensors with gradient, each of which holds a whole graph. Otherwise it keeps them, and so
    shows what a forgotten `detach` costs.
    """

    def __init__(self, *, detached: bool) -> None:
        self._detached = detached
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, part: LossMetrics) -> None:
        if self._detached:
            _require_detached(part.sums | part.maxima)
        for name, value in part.sums.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value
        for name, value in part.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def over_ranks(self, updates: int) -> dict[str, float]:
        """Sums over all ranks, as means over the step's `updates`, and maxima. Every rank has added the same names."""
        sums, maxima = (torch.stack(list(kept.values())).detach() for kept in (self._sums, self._maxima))
        dist.all_reduce(sums, dist.ReduceOp.SUM)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        values = torch.cat([sums / updates, maxima]).tolist()
        return dict(zip([*self._sums, *self._maxima], values, strict=True))


def _require_detached(metrics: Mapping[str, Tensor]) -> None:
    for name, value in metrics.items():
        if value.requires_grad:
            raise ValueError(
                f"expected the metric {name} without gradient, found one that keeps its graph alive; detach it"
            )


def allow_kept_graphs() -> None:
    """Compile the layers such that their graphs can outlive a backward pass; costs a new compilation.

    Otherwise backward reuses the memory of what forward has saved, and torch refuses to keep such a graph.
    """
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()
