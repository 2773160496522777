"""Numbers of processes that can form one engine of vLLM, each with a GPU of its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljob_memory.budget import Setup

_SIZES = (1, 2, 4, 8)
"""Sizes that `rollout.tensorParallelSize: Auto` stands for."""
BLOCK = 128
"""Inputs of a linear layer that share a scale: vLLM 0.26, `Fp8PerBlockOnlineLinearMethod`."""


def engine_sizes(setup: Setup) -> Sequence[int]:
    """The sizes from which a plan can choose: the one of the manifest, or, with Auto, those with which engines fill
    their pods and the model can be divided. Numbers of the model that are not known suit any size."""
    work, model = setup.work, setup.model
    if not work.auto_engines:
        return [work.tensor_parallel_size]
    most = work.engine_processes_per_pod if setup.hardware.device == "cuda" else 1
    possible = [size for size in _SIZES if most % size == 0]
    possible = [size for size in possible if divides(size, model.heads, model.kv_heads, model.intermediate)]
    if work.quantized_weights:
        widths = model.hidden, model.attention_width, model.intermediate
        possible = [size for size in possible if size == 1 or not uneven_inputs(size, *widths)]
    return possible


def divides(size: int, heads: int, kv_heads: int, intermediate: int) -> bool:
    """True if vLLM can divide a model among `size` processes.

    Each process of an engine has equally many attention heads and columns of the MLP. It has whole key-value heads:
    their number is a multiple of the processes, or the processes of the heads, which are then repeated.
    """
    return heads % size == 0 and intermediate % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def uneven_inputs(size: int, hidden: int, attention_width: int, intermediate: int) -> Mapping[str, int]:
    """Inputs of the linear layers in each of `size` processes that are no multiple of 128, by the model's settings that
    they follow from. With 8 bits in blocks, there must be none.

    On GPUs of compute capability 8.9 or newer, every kernel of vLLM 0.26 quantizes its inputs with
    `per_token_group_quant_fp8`, which requires a multiple of 128. The rows of a weight are padded.
    """
    inputs = {
        "hidden_size": hidden,
        "num_attention_heads x head_dim": attention_width // size,
        "intermediate_size": intermediate // size,
    }
    return {name: count for name, count in inputs.items() if count % BLOCK}
