"""/dev/shm of a pod or machine: Ray's object store, and buffers of NCCL and vLLM."""

from __future__ import annotations

from typing import Literal

from rljob_memory.sizes import MIB

_SMALLEST_OBJECT_STORE_BYTES = 128 * MIB

_NCCL_BYTES_PER_RANK = 64 * MIB
"""NCCL's buffers for GPUs of one machine without peer-to-peer access. Not measured."""

_VLLM_QUEUE_BYTES = 24 * MIB
"""vLLM's queue between the processes of an engine, six messages of 4 MiB; counted for each of them."""


def object_store_bytes(sync_bucket_bytes: int, device: Literal["cpu", "cuda"]) -> int:
    """Size for a step's rollouts and, on CPUs, two buckets of weights: one is read while the next is packed.

    On GPUs the weights do not pass through the object store.
    """
    buckets = 2 if device == "cpu" else 0
    return _SMALLEST_OBJECT_STORE_BYTES + buckets * sync_bucket_bytes


def shared_memory_bytes(
    sync_bucket_bytes: int, device: Literal["cpu", "cuda"], ranks: int, tensor_parallel_processes: int = 0
) -> int:
    """The object store and the buffers of one pod's processes that communicate.

    `ranks`: policy ranks of the pod. `tensor_parallel_processes`: its processes of engines that have several each.
    """
    in_groups = (ranks if ranks > 1 else 0) + tensor_parallel_processes
    nccl = _NCCL_BYTES_PER_RANK * in_groups if device == "cuda" else 0
    return object_store_bytes(sync_bucket_bytes, device) + nccl + _VLLM_QUEUE_BYTES * tensor_parallel_processes
