"""vLLM's side of an engine with several processes (tensor parallelism). Imports vLLM.

Each is an actor of its own with a GPU of its own, as in vLLM's `external_launcher`: it has a scheduler, gets the same
requests, and samples the same tokens from the same logits. vLLM therefore starts no processes, which would outlive an
actor that is killed, and every failure, memory sample and sleep is that of a process which Ray knows. An engine never
spans machines.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from typing import Any, ClassVar

import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from rljob_client.errors import RunError
from rljob_trainer.rollout.engine import ENGINE_HOST


class ShardExecutor(ExecutorWithExternalLauncher):
    """Runs this process's part of the engine.

    vLLM's own executor takes its place from environment variables, and derives from them a name of shared memory that
    is the same for all engines of a machine.
    """

    shard: ClassVar[int]
    store_port: ClassVar[int]

    def _distributed_args(self) -> tuple[str, int, int]:
        own_gpu = 0  # the first of those that it sees
        return f"tcp://{ENGINE_HOST}:{self.store_port}", self.shard, own_gpu


def shard_executor(shard: int, store_port: int) -> str:
    """The executor of this process, which is `shard` of its engine, as vLLM's `distributed_executor_backend`.

    `store_port`: port at which the processes of the engine meet.
    """
    ShardExecutor.shard, ShardExecutor.store_port = shard, store_port
    return f"{__name__}.{ShardExecutor.__name__}"


def require_same_tokens(request_outputs: Iterable[Any]) -> None:
    """Raise `RunError` if the processes of the engine have generated different tokens. Collective."""
    digest = 0
    for request in request_outputs:
        for output in sorted(request.outputs, key=lambda output: output.index):
            digest = zlib.crc32(array("q", output.token_ids).tobytes(), digest)
    group = get_world_group().cpu_group
    found: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(found, digest, group=group)
    if len(set(found)) > 1:
        raise RunError(
            "expected the processes of the engine to generate the same tokens, found different ones; remove "
            "rollout.engineArgs that change how requests are scheduled or sampled"
        )
