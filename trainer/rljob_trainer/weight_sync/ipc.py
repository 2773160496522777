"""GPU backend, the policy's side: CUDA IPC from the policy's process to the engine's on the same GPU.

The engine's side is vLLM's `ipc` backend, whose packed format this writes. vLLM's own sender makes one IPC handle for
all buckets of a sync, while its engine gives the handle back once a bucket: torch's count of uses no longer adds up,
and the staging buffer is kept for good, one more with every sync (seen with vLLM 0.26). Here each bucket has a handle
of its own.

The caller sees to it that expandable segments are off while buckets are staged: legacy IPC cannot export them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rljob_trainer.weight_sync.buckets import buckets, layout, packed
from rljob_trainer.weight_sync.engine_calls import EngineCalls

if TYPE_CHECKING:
    import torch


def send(parameters: Iterable[tuple[str, torch.Tensor]], calls: EngineCalls, bucket_bytes: int) -> None:
    """Stage parameters bucket after bucket, each until all engines have read it.

    Every rank stages all of them on its own GPU; the rank that calls the engines tells them where.
    """
    import torch
    import torch.distributed as dist

    for bucket in buckets(parameters, bucket_bytes):
        buffer = packed(bucket)
        torch.cuda.current_stream().synchronize()
        handles = _handles_by_gpu(buffer)
        calls.begin("update_weights", {**layout(bucket), "ipc_handles": handles, "packed": True})
        calls.wait()
        dist.barrier()
        del buffer
        torch.cuda.ipc_collect()


def _handles_by_gpu(buffer: torch.Tensor) -> dict[str, Any]:
    """What opens this bucket's buffer in another process, of every rank, by the GPU's UUID. Collective."""
    import torch
    import torch.distributed as dist
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    gpu = str(torch.cuda.get_device_properties(buffer.device).uuid)
    of_all_ranks: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all_ranks, {gpu: arguments})
    return {gpu: arguments for handles in of_all_ranks for gpu, arguments in handles.items()}
