"""Sizes of a model whose weights an engine quantizes in blocks."""

from __future__ import annotations

from pathlib import Path

from rljob_client.errors import BadInput
from rljob_client.model_files import read_config

_BLOCK = 128
"""Inputs of a linear layer that share a scale: vLLM 0.26, `Fp8PerBlockOnlineLinearMethod`."""


def require_whole_blocks(directory: Path, tensor_parallel_size: int) -> None:
    """Raise `BadInput` if vLLM cannot divide the inputs of the linear layers of the model in `directory` into blocks.

    On GPUs of compute capability 8.9 or newer, every kernel of vLLM 0.26 quantizes its inputs with
    `per_token_group_quant_fp8`, which requires a multiple of 128. The rows of a weight are padded. Weights may be
    missing; a configuration without these numbers is left to vLLM.
    """
    config = read_config(directory)
    hidden, heads, width = (config.get(name) for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    if not (isinstance(hidden, int) and isinstance(heads, int) and isinstance(width, int)):
        return
    head_dim = config.get("head_dim") or hidden // heads
    inputs = {
        "hidden_size": hidden,
        "num_attention_heads x head_dim": heads * head_dim // tensor_parallel_size,
        "intermediate_size": width // tensor_parallel_size,
    }
    if uneven := [f"{name}: {size}" for name, size in inputs.items() if size % _BLOCK]:
        of_each = f" in each of {tensor_parallel_size} processes" if tensor_parallel_size > 1 else ""
        raise BadInput(
            f"rollout.quantization: expected a model whose linear layers have multiples of {_BLOCK} inputs for "
            f"Fp8PerBlock, found {', '.join(uneven)}{of_each}; write Fp8PerChannel"
        )
