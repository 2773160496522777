"""Parameters in pieces that are staged at once, for both backends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NamedTensors = list[tuple[str, "torch.Tensor"]]


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
