"""GPU backend, the policy's side: CUDA IPC from the policy's process to the engine's on the same GPU.

The engine's side is vLLM's `ipc` backend, whose packed format this writes. The caller sees to it that expandable
segments are off while buffers are made: legacy IPC cannot export them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rljob_trainer.weight_sync.transfer import EngineCalls, NamedTensors, buckets, layout, packed

if TYPE_CHECKING:
    import torch

Handle = tuple[Any, ...]
"""What another process on the same GPU opens a buffer with: arguments of torch's `rebuild_cuda_tensor`."""


class ReservedBuffer:
    """A buffer of `capacity_bytes` that is kept and filled anew for each bucket. It is exported once.

    vLLM's engine gives the handle back once a bucket, so torch's count of uses does not add up and torch never frees
    what was exported: right for a buffer that stays as long as the process.
    """

    def __init__(self, capacity_bytes: int) -> None:
        import torch

        self.capacity_bytes = capacity_bytes
        self._memory = torch.empty(capacity_bytes, dtype=torch.uint8, device="cuda")
        self._handle = _handle(self._memory)

    @contextmanager
    def filled(self, bucket: NamedTensors) -> Iterator[Handle]:
        """Within, the buffer begins with the bucket's bytes; every engine must have read them when it ends."""
        packed(bucket, into=self._memory)
        yield self._handle


@contextmanager
def fresh_buffer(bucket: NamedTensors) -> Iterator[Handle]:
    """Within, a buffer of the bucket's bytes alone; afterwards it is freed, if the engines have let go of it.

    A handle of its own for each: of one that is opened more than once, torch would keep the buffer for good (see
    `ReservedBuffer`), one more with every sync.
    """
    import torch

    buffer = packed(bucket)
    try:
        yield _handle(buffer)
    finally:
        del buffer
        torch.cuda.ipc_collect()


def send(
    parameters: Iterable[tuple[str, torch.Tensor]],
    calls: EngineCalls,
    bucket_bytes: int,
    reserved: ReservedBuffer | None,
) -> None:
    """Stage parameters bucket after bucket, each until all engines have read it.

    Every rank stages all of them on its own GPU; the rank that calls the engines tells them where. `reserved`: where to
    stage; None: in a buffer for each bucket.
    """
    import torch
    import torch.distributed as dist

    staged = fresh_buffer if reserved is None else reserved.filled
    for bucket in buckets(parameters, bucket_bytes):
        with staged(bucket) as handle:
            torch.cuda.current_stream().synchronize()
            handles = _handles_by_gpu(handle)
            calls.begin("update_weights", {**layout(bucket), "ipc_handles": handles, "packed": True})
            calls.wait()
            dist.barrier()


def _handle(buffer: torch.Tensor) -> Handle:
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    return tuple(arguments)


def _handles_by_gpu(handle: Handle) -> dict[str, Handle]:
    """The handles of all ranks' buffers, by the GPU's UUID. Collective."""
    import torch
    import torch.distributed as dist

    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    of_all_ranks: list[dict[str, Handle]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all_ranks, {gpu: handle})
    return {gpu: handle for handles in of_all_ranks for gpu, handle in handles.items()}
