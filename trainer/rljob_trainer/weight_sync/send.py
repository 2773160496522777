"""The policy's side of a weight sync."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from rljob_trainer.weight_sync import ipc
from rljob_trainer.weight_sync.ipc import ReservedBuffer
from rljob_trainer.weight_sync.transfer import EngineCalls, buckets, layout, packed

if TYPE_CHECKING:
    import torch


def send_weights(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    engines: Sequence[Any],
    version: int,
    bucket_bytes: int,
    rank: int,
    reserved: ReservedBuffer | None = None,
) -> None:
    """Send every parameter to every engine. Afterwards the engines generate with weights `version`.

    `named_parameters`: checkpoint names and full tensors, on the device of the engines. `engines`: Ray actor handles of
    `RolloutEngine`. `bucket_bytes`: approximate size of the weights that are staged at once. `reserved`: the staging
    buffer on GPUs; None: a new one for each bucket.
    Collective, since gathering a parameter is; rank 0 calls the engines. If it raises, the engines do not generate
    until a later call completes.
    """
    parameters = iter(named_parameters)
    first = next(parameters)
    calls = EngineCalls(engines if rank == 0 else [])
    calls.begin("start_weight_update")
    if first[1].is_cuda:
        ipc.send(chain([first], parameters), calls, bucket_bytes, reserved)
    else:
        _send_through_object_store(chain([first], parameters), calls, bucket_bytes)
    calls.begin("finish_weight_update", version)
    calls.wait()


def _send_through_object_store(
    parameters: Iterable[tuple[str, torch.Tensor]], calls: EngineCalls, bucket_bytes: int
) -> None:
    """CPU backend: tensors go through Ray's object store in shared memory, bucket after bucket.

    A rank without engines to call only takes part in gathering the parameters.
    """
    import ray

    for bucket in buckets(parameters, bucket_bytes):
        if calls.engines:
            # One bucket is packed while the engines read the previous one.
            calls.wait(until_left=1)
            # Stored once, whatever the number of engines: each maps it.
            calls.begin("update_weights", ray.put({**layout(bucket), "buffer": packed(bucket).numpy()}))
