"""Shared by both backends of the policy's side: packing of parameters into buckets, and calls to the engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rljob_trainer.errors import WorkerLost

if TYPE_CHECKING:
    import torch


NamedTensors = list[tuple[str, "torch.Tensor"]]


def buckets(parameters: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[NamedTensors]:
    """Group parameters in order into buckets of at most `bucket_bytes`. A larger parameter gets its own bucket."""
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

    `into`: a buffer of uint8, filled from its start; None: a new buffer of the required size.
    """
    import torch

    parts = [tensor.contiguous().flatten().view(torch.uint8) for _, tensor in bucket]
    start = None if into is None else into[: sum(part.numel() for part in parts)]
    return torch.cat(parts, out=start)


def layout(bucket: NamedTensors) -> dict[str, Any]:
    """The layout of the packed buffer, with the field names of vLLM's update info. `tensor_sizes` are in bytes."""
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "tensor_sizes": [tensor.nbytes for _, tensor in bucket],
    }


class EngineCalls:
    """Calls all engines at once. An engine serves calls in order, so that they need not be awaited one by one."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self.engines = engines
        self._pending: deque[list[Any]] = deque()

    def begin(self, method: str, *arguments: Any) -> None:
        self._pending.append([getattr(engine, method).remote(*arguments) for engine in self.engines])

    def wait(self, *, until_left: int = 0) -> None:
        """Return when at most `until_left` calls are pending. Raises the error of the first failing call.

        Raises `WorkerLost` if an engine has died.
        """
        import ray
        from ray import exceptions

        while len(self._pending) > until_left:
            for rank, reference in enumerate(self._pending.popleft()):
                try:
                    ray.get(reference)
                except exceptions.RayActorError as error:
                    engine = f"rollout-{rank}"
                    raise WorkerLost(f"{engine} died while receiving the weights").of(engine) from error
