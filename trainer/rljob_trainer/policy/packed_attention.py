"""Attention over packed sequences: several, end to end in one row, each attending to itself alone.

Without padding, every token that goes through the model counts. A sequence may continue another one, so that the
responses to a prompt share its tokens. On a GPU, a kernel for sequences of different lengths takes their bounds;
on a CPU, each sequence has its own call. The functions of transformers' models pass the bounds through.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rljob_trainer.algorithm.packing import BOUNDS, Sizes, packing_of
from rljob_trainer.policy import flash_attention_2, flash_attention_4, packed_kernel

NAME = "rljob_packed"
"""The attention implementation's name in transformers. It has no function for masks, and so gets none."""

PACKED_KINDS = frozenset({"gemma", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"})
"""Kinds of models (`model_type`) that compute the same packed as one by one. Others could mix sequences: recurrent
layers, for example, read the row from left to right."""

ENABLED = "RLJOB_PACK_SEQUENCES"
"""Environment variable. 0: sequences are padded, for comparison."""

_ATTENDING = {"full_attention", "sliding_attention"}
_TOLERANCE = 0.03
"""Largest difference of the kernel from attention in float32, relative to the largest value. bfloat16 has 8 bits."""

_FLASH_ATTENTION_4 = {9, 10}
"""Major compute capabilities with kernels of FlashAttention 4: Hopper and Blackwell."""

log = structlog.get_logger()


def can_pack(model_dir: Path, device: str, dtype: torch.dtype) -> bool:
    """True if the model and the device support packed sequences. On a GPU, the kernel is tried out."""
    from transformers import AutoConfig

    if os.environ.get(ENABLED) == "0":
        return False
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except Exception:  # transformers checks a configuration with any type of exception
        return False  # the error is reported when the model is read
    if config.model_type not in PACKED_KINDS or not set(getattr(config, "layer_types", None) or ()) <= _ATTENDING:
        log.info("sequences are padded: packing was not tested with this kind of model", kind=config.model_type)
        return False
    if device == "cpu":
        return True
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return dtype == torch.bfloat16 and _choose_kernel(heads, config.num_key_value_heads or heads, head_dim)


def register() -> None:
    """Make the attention known to transformers as `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: None,
    *,
    bounds: Tensor,
    prompt_bounds: Tensor,
    response_bounds: Tensor,
    sizes: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of the only row, and to the sequence that it continues.

    `query`: [1, heads, T, D]; `key` and `value`: [1, KV heads, T, D]. Bounds: see `packing_of`. `sizes`: [6] int64 on
    the host, the fields of `Sizes`. Returns [1, T, heads, D] of the dtype of `query`. Raises `ValueError` if scores are
    to be capped.
    """
    if softcap is not None:
        raise ValueError("expected attention without a cap of its scores")
    q, k, v = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    packing = bounds, prompt_bounds, response_bounds, sizes
    if query.is_cuda:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output, _normalizers = packed_kernel.attend(q, k, v, *packing, scale, sliding_window or 0)
        return output[None], None
    return _one_by_one(q, k, v, *packing, scaling, sliding_window)[None], None


def _mask(begin: int, tokens: int, window: int | None) -> Tensor | None:
    """[tokens, begin + tokens], true where one of `tokens` after `begin` others attends; None if to all before it."""
    if not begin and (window is None or tokens <= window):
        return None
    distance = torch.arange(begin, begin + tokens)[:, None] - torch.arange(begin + tokens)
    return (distance >= 0) & (distance < (window or len(distance) + begin))


@functools.cache
def _choose_kernel(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Choose the fastest kernel that is right with this shape, at least for sequences that share no prompt. False if
    none is."""
    has_version_4 = torch.cuda.get_device_capability()[0] in _FLASH_ATTENTION_4
    kernels = (flash_attention_4, flash_attention_2) if has_version_4 else (flash_attention_2,)
    for kernel, shares in product(kernels, (True, False)):
        packed_kernel.causal_kernel, packed_kernel.can_share_prompts = kernel, shares
        if _is_right(heads, kv_heads, head_dim):
            return True
    return False


def _is_right(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Compare the chosen kernel with attention in float32, forward and backward, on sequences of several lengths. If
    prompts can be shared, two continue the first, and one the second."""
    lengths, shares = [150, 5, 130, 1, 3, 40], packed_kernel.can_share_prompts
    chosen = {"kernel": packed_kernel.causal_kernel.__name__, "shared_prompts": shares}
    generator = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(sum(lengths), count, head_dim, device="cuda", generator=generator)
        for count in (heads, kv_heads, kv_heads)
    ]
    packing = packing_of(lengths, [2, 1] if shares else [])
    layout = *(packing[name].cuda() for name in BOUNDS), torch.tensor(packing["sizes"])
    try:
        query, key, value = rounded = [each.bfloat16().requires_grad_() for each in given]
        found = [packed_kernel.attend(query, key, value, *layout, head_dim**-0.5, 0)[0]]
        found += torch.autograd.grad(found[0].float().square().sum(), rounded)
        query, key, value = exact = [each.detach().float().requires_grad_() for each in rounded]
        expected = [_one_by_one(query, key, value, *layout)]
        expected += torch.autograd.grad(expected[0].square().sum(), exact)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a kernel that is compiled here raises any type of exception
        log.warning("an attention kernel for packed sequences failed", **chosen, error=str(error))
        return False
    errors = [
        float((ours.detach().float() - theirs.detach()).abs().max() / theirs.detach().abs().max())
        for ours, theirs in zip(found, expected, strict=True)
    ]
    is_exact = all(error <= _TOLERANCE for error in errors)  # not max(), which may pass over NaN
    if not is_exact:
        log.warning("an attention kernel for packed sequences is inexact", **chosen, errors=errors)
    return is_exact


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    prompt_bounds: Tensor,
    response_bounds: Tensor,
    sizes: Tensor,
    scaling: float | None = None,
    window: int | None = None,
) -> Tensor:
    """[T, heads, D]: a call for each sequence, on any device."""
    prompts, responses, first = prompt_bounds.tolist(), response_bounds.tolist(), Sizes(*sizes.tolist()).first
    outputs = []
    for start, stop in pairwise(bounds.tolist()):
        keys = [slice(start, stop)]
        if first <= start < first + responses[-1]:
            prompt = bisect_right(responses, start - first) - 1
            keys.insert(0, slice(prompts[prompt], prompts[prompt + 1]))
        q, k, v = (
            torch.cat([each[rows] for rows in chosen]).transpose(0, 1)[None]
            for each, chosen in ((query, keys[-1:]), (key, keys), (value, keys))
        )
        mask = _mask(k.shape[2] - q.shape[2], q.shape[2], window)
        mask = None if mask is None else mask.to(q.device)
        shared = query.shape[1] != key.shape[1]
        outputs.append(
            scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=shared)
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)
