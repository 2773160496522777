"""Parameters in pieces that are staged at once, for both backends, each packed end to end into one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

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


def packed(bucket: NamedTensors, into: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of all tensors of the bucket end to end, uint8, on their device.

    `into`: a buffer of uint8, at whose start they are put; None: in a new one of their size.
    """
    import torch

    parts = [tensor.contiguous().flatten().view(torch.uint8) for _, tensor in bucket]
    start = None if into is None else into[: sum(part.numel() for part in parts)]
    return torch.cat(parts, out=start)


def layout(bucket: NamedTensors) -> dict[str, Any]:
    """How to cut the packed buffer again, under the names of vLLM's update infos; `tensor_sizes` in bytes."""
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "tensor_sizes": [tensor.nbytes for _, tensor in bucket],
    }
