"""Facts about a job's model and machine, reported by the trainer, from which its memory budget follows."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob_api.api_model import ApiModel, Count, PositiveCount


class MemoryFacts(ApiModel):
    """Shape of the model and size of the machine, which do not change during an attempt. With the job's spec and a
    memory plan they determine the memory budget. Sizes of memory are in bytes."""

    parameters: PositiveCount
    """Parameters of the model; tied ones count once."""

    layers: PositiveCount
    """Decoder layers."""

    hidden: PositiveCount
    """Hidden size."""

    heads: Count = 0
    """Attention heads. 0: unknown."""

    kv_heads: PositiveCount
    """Heads of keys and values."""

    head_dim: PositiveCount
    """Numbers in a head."""

    intermediate: Count = 0
    """Size of the MLP. 0: unknown."""

    vocabulary: PositiveCount
    """Size of the vocabulary."""

    bytes_per_parameter: PositiveCount
    """Bytes of a parameter in the forward pass: 2 for bfloat16, 4 for float32."""

    adapter_parameters: Count = 0
    """Parameters of low-rank adapters (policy.lora). 0: all parameters are trained."""

    device_memory_bytes: Count = 0
    """Memory of one GPU of the policy. 0 on the CPU."""

    engine_device_memory_bytes: Count = 0
    """Memory of one GPU of the engines, if it differs. 0: it does not."""

    host_memory_bytes: Count = 0
    """Host memory that the job may use, in all workers together: limits of containers, or memory of machines."""

    shared_memory_bytes: Count = 0
    """Size of /dev/shm of a worker. 0: unknown."""

    gpu: Annotated[str, Field(max_length=64)] = ""
    """Product name of the GPU. Empty: unknown."""

    layers_compiled: bool = False
    """The policy's layers are compiled."""
