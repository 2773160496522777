"""Weight sync to engines that share memory with the policy: CUDA IPC on a GPU, Ray's object store on a CPU.

On a GPU, each rank sends to the engine on its own GPU, which reads the rank's memory: the weights themselves, or
buffers that they are gathered into.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, cycle
from typing import Any

import torch
from torch import Tensor

from rljob_trainer.weight_sync.cuda_ipc import shared
from rljob_trainer.weight_sync.transfer import EngineCalls, NamedTensors, buckets, layout, packed


def send_weights(
    named_parameters: Iterable[tuple[str, Tensor]],
    engines: Sequence[Any],
    version: int,
    bucket_bytes: int,
    rank: int,
    staging: Staging | None = None,
) -> None:
    """Send every parameter to every engine. Afterwards the engines generate with weights `version`.

    `named_parameters`: checkpoint names and full tensors, on the device of the engines. `engines`: Ray actor handles of
    `RolloutEngine`; on GPUs, one for each rank. `bucket_bytes`: approximate size of the weights that are staged at
    once. `staging`: buffers on the GPU; None: other processes can open the memory of the parameters.
    Collective, since gathering a parameter is. If it raises, the engines do not generate until a later call completes.
    """
    parameters = iter(named_parameters)
    first = next(parameters)
    whole, on_gpu = chain([first], parameters), first[1].is_cuda
    calls = EngineCalls([engines[rank]] if on_gpu else engines if rank == 0 else [])
    calls.begin("start_weight_update")
    if on_gpu:
        send_by_ipc([list(whole)] if staging is None else buckets(whole, bucket_bytes), calls, staging)
    else:
        _send_through_object_store(buckets(whole, bucket_bytes), calls)
    calls.begin("finish_weight_update", version)
    calls.wait()


def send_by_ipc(parts: Iterable[NamedTensors], calls: EngineCalls, staging: Staging | None) -> None:
    """Let the engine read each bucket where it is, or from buffers, while the next one is gathered."""
    for bucket in parts:
        calls.wait(until_left=1)
        if staging is None:
            place = {**shared([tensor for _, tensor in bucket]), "is_kept": True}
        else:
            place = staging.filled(bucket)
        calls.begin("update_weights", {**layout(bucket), **place})


def _send_through_object_store(parts: Iterable[NamedTensors], calls: EngineCalls) -> None:
    """One bucket is packed while the engines read the previous one. Only the rank that calls engines has to pack it."""
    import ray

    for bucket in parts:
        if calls.engines:
            calls.wait(until_left=1)
            # Stored once for all engines: each maps it.
            calls.begin("update_weights", ray.put({**layout(bucket), "buffer": packed(bucket).numpy()}))


class Staging:
    """Two buffers on the GPU that are filled in turn. The engine has read one before it is filled again."""

    def __init__(self, capacity_bytes: int, *, is_kept: bool) -> None:
        """`capacity_bytes`: of each. `is_kept`: they outlive the sync, so that the engine need not close them.

        Expandable segments must be off: their memory cannot be opened.
        """
        self.capacity_bytes, self.is_kept = capacity_bytes, is_kept
        self._memory = [torch.empty(capacity_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._buffers = cycle((0, 1))

    def filled(self, bucket: NamedTensors) -> dict[str, Any]:
        """Fill a buffer with the bucket. Returns its place there, with the field names of `CudaIpcUpdateInfo`."""
        content = packed(bucket, into=self._memory[next(self._buffers)])
        parts = content.split([tensor.nbytes for _, tensor in bucket])
        return {**shared(parts), "is_kept": self.is_kept}

    def free(self) -> None:
        """Free the buffers, which the engine has closed."""
        self._memory.clear()
