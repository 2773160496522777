"""Shared by both backends of the policy's side: packing of parameters into buckets, and calls to the engines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rljob_trainer.errors import WorkerLost

if TYPE_CHECKING:
    import torch


NamedTensors = list[tuple[str, "torch.Tensor"]]


def buckets(parameters: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[NamedTensors]:
    """Group parameters of any shape in order into buckets of at most `bucket_bytes`. A larger unit has its own bucket.

    A unit (see `unit_of`) is never divided: vLLM keeps references to a bucket's memory until it has all weights of a
    fused layer, such as those of queries, keys and values. The next bucket may overwrite this memory.
    """
    bucket: NamedTensors = []
    filled = 0
    for _, members in groupby(parameters, key=lambda parameter: unit_of(parameter[0])):
        unit = [(name, tensor.detach()) for name, tensor in members]
        size = sum(tensor.nbytes for _, tensor in unit)
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket += unit
        filled += size
    if bucket:
        yield bucket


def unit_of(name: str) -> str:
    """The module whose weights the engine may fuse with this one: `model.layers.0.mlp.up_proj.weight` → its `mlp`."""
    return name.rpartition(".")[0].rpartition(".")[0]


def largest_unit_bytes(parameters: Iterable[tuple[str, int]]) -> int:
    """The size of the largest unit. `parameters`: names and sizes in bytes, in the order in which they are sent."""
    units = groupby(parameters, key=lambda parameter: unit_of(parameter[0]))
    return max(sum(size for _, size in members) for _, members in units)


def packed(bucket: NamedTensors, into: torch.Tensor | None = None) -> torch.Tensor:
    """[bytes] All tensors of the bucket end to end, uint8, on their device.

    `into`: a buffer of uint8, filled from its start; None: a new buffer of the required size. Raises `ValueError` if it
    is too small.
    """
    import torch

    parts = [tensor.contiguous().flatten().view(torch.uint8) for _, tensor in bucket]
    if into is None:
        return torch.cat(parts)
    size = sum(part.numel() for part in parts)
    if size > into.numel():  # torch would allocate another buffer, which nobody has opened
        raise ValueError(f"expected a bucket of at most {into.numel()} bytes, found {size}")
    return torch.cat(parts, out=into[:size])


def layout(bucket: NamedTensors) -> dict[str, Any]:
    """The layout of the packed buffer, with the field names of vLLM's update info. `tensor_sizes` are in bytes."""
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "tensor_sizes": [tensor.nbytes for _, tensor in bucket],
    }


class EngineCalls:
    """Calls all engines at once. An engine serves calls in order, so callers need not await each call."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self.engines = engines
        self._names = [getattr(engine, "name", f"rollout-{place}") for place, engine in enumerate(engines)]
        self._pending: deque[list[Any]] = deque()

    def begin(self, method: str, *arguments: Any) -> None:
        self.begin_each(method, [arguments] * len(self.engines))

    def begin_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> None:
        """Like `begin`, with separate arguments for each engine."""
        self._pending.append(
            [getattr(engine, method).remote(*own) for engine, own in zip(self.engines, arguments, strict=True)]
        )

    def wait(self, *, until_left: int = 0) -> None:
        """Return when at most `until_left` calls are pending. Raises the error of the first failing call.

        Raises `WorkerLost` if an engine has died.
        """
        import ray

        while len(self._pending) > until_left:
            name_of = dict(zip(self._pending.popleft(), self._names, strict=True))
            left = list(name_of)
            while left:  # as they end: an engine may wait for a lost one
                [ended], left = ray.wait(left, num_returns=1)
                _result(ended, name_of[ended])

    def raise_failure(self, within_seconds: float = 0.0) -> None:
        """Raise the error of a pending call that has failed, or fails `within_seconds`, as `wait` does."""
        import ray

        name_of = {
            reference: name
            for references in self._pending
            for name, reference in zip(self._names, references, strict=True)
        }
        pending, deadline = list(name_of), time.monotonic() + within_seconds
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
            for reference in done:  # in the order of the calls: later ones fail because of the first
                _result(reference, name_of[reference])
            if (seconds_left := deadline - time.monotonic()) <= 0:
                return
            if pending:
                ray.wait(pending, num_returns=1, timeout=seconds_left)


def _result(reference: Any, engine: str) -> None:
    import ray
    from ray import exceptions

    try:
        ray.get(reference)
    except exceptions.RayActorError as error:
        raise WorkerLost(f"{engine} died while receiving the weights").of(engine) from error
