"""GPU backend, the policy's side: CUDA IPC to the engine's process on the same GPU.

The engine's side is vLLM's `ipc` backend, whose packed format this writes. The caller must disable expandable segments
while buffers are allocated: legacy IPC cannot export them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rljob_trainer.weight_sync.transfer import EngineCalls, NamedTensors, buckets, layout, packed

if TYPE_CHECKING:
    import torch

Handle = tuple[Any, ...]
"""Arguments of torch's `rebuild_cuda_tensor`, with which another process on the same GPU opens a buffer."""


class ReservedBuffer:
    """A buffer of `capacity_bytes` that is kept, exported once, and refilled for each bucket.

    vLLM's engine closes the handle once per bucket. torch's reference count is then wrong, and torch never frees the
    buffer, which is acceptable because it lives as long as the process.
    """

    def __init__(self, capacity_bytes: int) -> None:
        import torch

        self.capacity_bytes = capacity_bytes
        self._memory = torch.empty(capacity_bytes, dtype=torch.uint8, device="cuda")
        self._handle = _handle(self._memory)

    @contextmanager
    def filled(self, bucket: NamedTensors) -> Iterator[Handle]:
        """Fill the buffer with the bucket. Every engine must have read it when the block ends."""
        packed(bucket, into=self._memory)
        yield self._handle


@contextmanager
def fresh_buffer(bucket: NamedTensors) -> Iterator[Handle]:
    """Allocate a buffer for the bucket. It is freed after the block, once the engines have closed it.

    Each buffer has its own handle: torch never frees a buffer whose handle was opened more than once (see
    `ReservedBuffer`), so that every sync would leak one.
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
    """Stage parameters bucket after bucket. Each bucket stays until all engines have read it.

    Every rank stages all parameters on its own GPU. The rank that calls the engines passes them the handles.
    `reserved`: the buffer to use; None: a new one for each bucket.
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
