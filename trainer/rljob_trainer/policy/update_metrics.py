"""Collects the metrics of an update on the device, and copies them to the host once, at the end."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_trainer.algorithm.loss import LossMetrics


class UpdateMetrics:
    """Adds up the metrics of micro-batches, then those of ranks."""

    def __init__(self, *, detached: bool) -> None:
        """`detached`: reject tensors with a gradient, which keep a graph alive. Otherwise keep them, to measure their
        cost."""
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

    def over_ranks(self, updates: int, counts: Mapping[str, int]) -> dict[str, float]:
        """Sums over all ranks, divided by the step's `updates`, and maxima. All ranks must add the same names.

        `counts`: of this rank; the maximum over the ranks is added.
        """
        sums, maxima = (torch.stack(list(kept.values())).detach() for kept in (self._sums, self._maxima))
        maxima = torch.cat([maxima, torch.tensor(list(counts.values()), dtype=maxima.dtype, device=maxima.device)])
        # A maximum over ranks may drop NaN, but not infinity.
        maxima = torch.where(maxima.isnan(), torch.inf, maxima)
        dist.all_reduce(sums, dist.ReduceOp.SUM)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        values = torch.cat([sums / updates, maxima]).tolist()
        return dict(zip([*self._sums, *self._maxima, *counts], values, strict=True))


def _require_detached(metrics: Mapping[str, Tensor]) -> None:
    for name, value in metrics.items():
        if value.requires_grad:
            raise ValueError(
                f"expected the metric {name} without gradient, found one that keeps its graph alive; detach it"
            )


def allow_kept_graphs() -> None:
    """Recompile the layers so that their graphs can be kept after a backward pass (`detach_metrics` disabled).

    Otherwise backward reuses the memory that forward has saved, and torch refuses to keep the graph.
    """
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()
