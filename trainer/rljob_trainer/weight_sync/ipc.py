"""GPU backend, the policy's side: CUDA IPC from the policy's process to the engine's on the same GPU.

The engine's side is vLLM's own. The caller sees to it that expandable segments are off while the staging buffer is
allocated: legacy IPC cannot export them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rljob_trainer.weight_sync.engine_calls import call_engines

if TYPE_CHECKING:
    import torch


def send(parameters: Iterable[tuple[str, torch.Tensor]], engines: Sequence[Any], bucket_bytes: int, rank: int) -> None:
    """Pack parameters into a staging buffer of `bucket_bytes`, which the engines read, until all are sent.

    Every rank stages all of them on its own GPU; rank 0 tells the engines where. A parameter larger than the buffer
    goes through one of its own size.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    def deliver(update_info: Any) -> None:
        call_engines(engines, "update_weights", asdict(update_info))

    for run, buffer_bytes in runs_by_buffer(parameters, bucket_bytes):
        IPCWeightTransferEngine.trainer_send_weights(
            run, {"send_mode": deliver, "packed": True, "packed_buffer_size_bytes": buffer_bytes}
        )


def runs_by_buffer(
    parameters: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[tuple[Iterator[tuple[str, torch.Tensor]], int]]:
    """Runs of parameters, each to be consumed before the next, with the size in bytes of the buffer they need."""
    for oversize, run in groupby(parameters, key=lambda parameter: parameter[1].nbytes > bucket_bytes):
        if oversize:
            yield from ((iter([parameter]), parameter[1].nbytes) for parameter in run)
        else:
            yield run, bucket_bytes
