"""FlashAttention 4 over packed sequences, for Hopper and Blackwell GPUs: the copy of its kernels that vLLM contains.

torch's own kernel is FlashAttention 2, which uses a third of a Hopper GPU's arithmetic. torch 2.11 can register version
4 as well, but refuses the backward pass of causal packed sequences.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_KERNELS = "vllm.vllm_flash_attn.cute.interface"


@functools.cache
def kernels() -> Any:
    """The module with the kernels. Raises `ImportError` without vLLM for CUDA and its CUTLASS DSL.

    The packages around it are not run: that of vLLM changes settings of torch's compiler.
    """
    found = PathFinder.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ImportError("expected the package vllm, found none")
    directory, stand_ins = Path(found.submodule_search_locations[0]), []
    for name, path in (("vllm", directory), ("vllm.vllm_flash_attn", directory / "vllm_flash_attn")):
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = [str(path)]
            sys.modules[name] = module
            stand_ins.append(name)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # compiling takes as long as a layer of torch
    try:
        return importlib.import_module(_KERNELS)
    finally:
        for name in stand_ins:
            del sys.modules[name]


@torch.library.custom_op("rljob::flash_attention_4", mutates_args=())
def flash_attention_4(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within each sequence: [T, heads, D], and the log-sum-exp of the scores, [heads, T] float32.

    `query`: [T, heads, D]; `key`, `value`: [T, KV heads, D]. `bounds`: [sequences + 1] int32. `longest`: tokens of the
    longest sequence, or more.
    """
    output, normalizers, *_ = kernels()._flash_attn_fwd(
        query, key, value, return_lse=True, **_options(bounds, longest, scale)
    )
    return output, normalizers


@flash_attention_4.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    output = query.new_empty(query.shape)
    return output, query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("rljob::flash_attention_4_backward", mutates_args=())
def _backward(
    output_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizers: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = kernels()._flash_attn_bwd(
        query, key, value, output, output_grad, normalizers, **_options(bounds, longest, scale)
    )
    return grads


@_backward.register_fake
def _(_output_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _options(bounds: Tensor, longest: int, scale: float) -> dict[str, Any]:
    bounds_of_both = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), bounds)
    longest_of_both = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), longest)
    return {**bounds_of_both, **longest_of_both, "causal": True, "softmax_scale": scale}


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, bounds)


def _differentiate(ctx: Any, output_grad: Tensor, _normalizers_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_backward(output_grad, *ctx.saved_tensors, *ctx.options), None, None, None


flash_attention_4.register_autograd(_differentiate, setup_context=_save)
