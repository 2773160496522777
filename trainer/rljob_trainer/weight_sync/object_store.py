"""CPU backend, the policy's side: tensors go through Ray's shared-memory object store, bucket after bucket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rljob_trainer.weight_sync.buckets import buckets, layout, packed
from rljob_trainer.weight_sync.engine_calls import call_engines

if TYPE_CHECKING:
    import torch


def send(parameters: Iterable[tuple[str, torch.Tensor]], engines: Sequence[Any], bucket_bytes: int, rank: int) -> None:
    """Send all parameters from rank 0; the other ranks only take part in gathering them."""
    import ray

    for bucket in buckets(parameters, bucket_bytes):
        if rank == 0:
            # Once into shared memory, whatever the number of engines: each maps it.
            call_engines(engines, "update_weights", ray.put({**layout(bucket), "buffer": packed(bucket).numpy()}))
