"""The policy's side of a weight sync."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from rljob_trainer.weight_sync import ipc, object_store
from rljob_trainer.weight_sync.engine_calls import EngineCalls

if TYPE_CHECKING:
    import torch


def send_weights(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    engines: Sequence[Any],
    version: int,
    bucket_bytes: int,
    rank: int,
) -> None:
    """Send every parameter to every engine; afterwards each generates with weights `version`.

    `named_parameters`: checkpoint names and full tensors, on the device the engines use; `engines`: Ray actor handles
    of `RolloutEngine`. All policy ranks call this together, since gathering a parameter is collective; rank 0 talks to
    the engines. About `bucket_bytes` are staged at once. Where it raises, the engines refuse to generate until a later
    call completes.
    """
    parameters = iter(named_parameters)
    first = next(parameters)
    transport = ipc if first[1].is_cuda else object_store
    calls = EngineCalls(engines if rank == 0 else [])
    calls.begin("start_weight_update")
    transport.send(chain([first], parameters), calls, bucket_bytes)
    calls.begin("finish_weight_update", version)
    calls.wait()
