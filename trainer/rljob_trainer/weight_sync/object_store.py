"""CPU backend, the policy's side: tensors go through Ray's shared-memory object store, bucket after bucket."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rljob_trainer.weight_sync.buckets import buckets, layout, packed
from rljob_trainer.weight_sync.engine_calls import EngineCalls

if TYPE_CHECKING:
    import torch


def send(parameters: Iterable[tuple[str, torch.Tensor]], calls: EngineCalls, bucket_bytes: int) -> None:
    """Send all parameters; a rank without engines to call only takes part in gathering them."""
    import ray

    for bucket in buckets(parameters, bucket_bytes):
        if calls.engines:
            # One bucket is made while the engines read the one before.
            calls.wait(until_left=1)
            # Once into shared memory, whatever the number of engines: each maps it.
            calls.begin("update_weights", ray.put({**layout(bucket), "buffer": packed(bucket).numpy()}))
