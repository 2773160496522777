"""Limits on the number of processes among which an engine divides a model."""

from __future__ import annotations

from pathlib import Path

from rljob_client.errors import BadInput
from rljob_client.model_files import read_config


def require_shardable(directory: Path, tensor_parallel_size: int) -> None:
    """Raise `BadInput` if vLLM cannot divide the model in `directory` by `tensor_parallel_size`.

    Each process of an engine has equally many attention heads and columns of the MLP. It has whole key-value heads:
    their number is a multiple of the processes, or the processes of the heads, which are then repeated. Weights may be
    missing; a configuration without these numbers is left to vLLM.
    """
    config = read_config(directory)
    heads, width = config.get("num_attention_heads"), config.get("intermediate_size")
    kv_heads = config.get("num_key_value_heads") or heads
    if not (isinstance(heads, int) and isinstance(width, int) and isinstance(kv_heads, int)):
        return
    possible = [size for size in range(1, heads + 1) if _divides(size, heads, kv_heads, width)]
    if tensor_parallel_size not in possible:
        raise BadInput(
            f"expected rollout.tensorParallelSize to suit the model's {heads} attention heads, {kv_heads} key-value "
            f"heads and MLP of {width}, found {tensor_parallel_size}; write "
            f"{' or '.join(map(str, possible[:6]))}"
        )


def _divides(size: int, heads: int, kv_heads: int, width: int) -> bool:
    return heads % size == 0 and width % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
