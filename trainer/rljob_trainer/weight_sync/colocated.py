"""Weight sync to engines that share memory with the policy: CUDA IPC on a GPU, Ray's object store on a CPU.

On a GPU, the engine's side is vLLM's `ipc` backend, whose packed format this writes. The caller must disable expandable
segments while buffers are allocated: legacy IPC cannot export them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rljob_trainer.weight_sync.transfer import EngineCalls, NamedTensors, buckets, layout, packed

Handle = tuple[Any, ...]
"""Arguments of torch's `rebuild_cuda_tensor`, with which another process on the same GPU opens a buffer."""


def send_weights(
    named_parameters: Iterable[tuple[str, Tensor]],
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
    for bucket in buckets(chain([first], parameters), bucket_bytes):
        if first[1].is_cuda:
            send_by_ipc(bucket, calls, reserved)
        else:
            _send_through_object_store(bucket, calls)
    calls.begin("finish_weight_update", version)
    calls.wait()


def send_by_ipc(bucket: NamedTensors, calls: EngineCalls, reserved: ReservedBuffer | None) -> None:
    """Every rank stages the bucket on its own GPU, until all engines have read it. One passes the handles of all."""
    with (fresh_buffer if reserved is None else reserved.filled)(bucket) as handle:
        torch.cuda.current_stream().synchronize()
        handles = _handles_by_gpu(handle)
        calls.begin("update_weights", {**layout(bucket), "ipc_handles": handles, "packed": True})
        calls.wait()
        dist.barrier()


def _send_through_object_store(bucket: NamedTensors, calls: EngineCalls) -> None:
    """One bucket is packed while the engines read the previous one. Only the rank that calls engines has to pack it."""
    import ray

    if calls.engines:
        calls.wait(until_left=1)
        # Stored once for all engines: each maps it.
        calls.begin("update_weights", ray.put({**layout(bucket), "buffer": packed(bucket).numpy()}))


class ReservedBuffer:
    """A buffer of `capacity_bytes` that is kept, exported once, and refilled for each bucket.

    vLLM's engine closes the handle once per bucket. torch's reference count is then wrong, and torch never frees the
    buffer, which is acceptable because it lives as long as the process.
    """

    def __init__(self, capacity_bytes: int) -> None:
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
    buffer = packed(bucket)
    try:
        yield _handle(buffer)
    finally:
        del buffer
        torch.cuda.ipc_collect()


def _handle(buffer: Tensor) -> Handle:
    _, arguments = reduce_tensor(buffer)
    return tuple(arguments)


def _handles_by_gpu(handle: Handle) -> dict[str, Handle]:
    """The handles of all ranks' buffers, by the GPU's UUID. Collective."""
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    of_all_ranks: list[dict[str, Handle]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all_ranks, {gpu: handle})
    return {gpu: handle for handles in of_all_ranks for gpu, handle in handles.items()}
