"""CPU backend, the policy's side: tensors go through Ray's shared-memory object store, bucket after bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rljob_trainer.weight_sync.engine_calls import call_engines

if TYPE_CHECKING:
    import torch

NamedTensors = list[tuple[str, "torch.Tensor"]]


def send(parameters: Iterable[tuple[str, torch.Tensor]], engines: Sequence[Any], bucket_bytes: int, rank: int) -> None:
    """Send all parameters from rank 0; the other ranks only take part in gathering them."""
    import ray

    for bucket in buckets(parameters, bucket_bytes):
        if rank == 0:
            names, tensors = zip(*bucket, strict=True)
            # One copy into shared memory, whatever the number of engines: each maps it.
            call_engines(engines, "update_weights", ray.put({"names": list(names), "tensors": list(tensors)}))


def buckets(parameters: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[NamedTensors]:
    """Runs of parameters of at most `bucket_bytes`, in order; a larger parameter has a bucket to itself."""
    bucket: NamedTensors = []
    filled = 0
    for name, tensor in parameters:
        if bucket and filled + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor.detach()))
        filled += tensor.nbytes
    if bucket:
        yield bucket
