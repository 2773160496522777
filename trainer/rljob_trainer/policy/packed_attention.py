"""Attention over packed sequences: several, end to end in one row, each attending to itself alone.

Without padding, every token that goes through the model counts. On a GPU, a kernel for sequences of different lengths
takes their bounds; on a CPU, each sequence has its own call. The functions of transformers' models pass the
bounds through, under the names that its own flash attention uses.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from rljob_trainer.policy.flash_attention_4 import flash_attention_4

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

_ASKS_FOR_SHARED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True since torch 2.12. Before, the kernel accepts fewer heads for keys and values without an argument."""

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
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of the only row.

    `query`: [1, heads, T, D]; `key` and `value`: [1, KV heads, T, D]. `cu_seq_lens_q`: [sequences + 1] int32, the first
    token of each sequence, and T. `max_length_q`: tokens of the longest sequence, or more. Returns [1, T, heads, D] of
    the dtype of `query`. Raises `ValueError` if scores are to be capped.
    """
    if softcap is not None:
        raise ValueError("expected attention without a cap of its scores")
    q, k, v = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    if query.is_cuda:
        return _by_kernel(q, k, v, cu_seq_lens_q, max_length_q, scaling, sliding_window)[None], None
    return _one_by_one(q, k, v, cu_seq_lens_q.diff().tolist(), scaling, sliding_window)[None], None


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """[T, heads, D] on a GPU."""
    kernel = _by_torch if window is not None else _kernel
    return kernel(query, key, value, bounds, longest, scaling, window)


def _by_flash_attention_4(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None, _window: None
) -> Tensor:
    scale = query.shape[2] ** -0.5 if scaling is None else scaling
    output: Tensor = flash_attention_4(query, key, value, bounds, longest, scale)[0]
    return output


def _by_torch(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """A window of 0 to the right is causal; one of w tokens reaches w − 1 to the left."""
    left = -1 if window is None else window - 1
    options: dict[str, Any] = {"scale": scaling, "window_size": (left, 0)}
    if _ASKS_FOR_SHARED_HEADS:
        options["enable_gqa"] = True
    output: Any = varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)
    return output  # type: ignore[no-any-return]


_kernel: Callable[..., Tensor] = _by_torch


def _choose_kernel(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Choose the fastest kernel that is right with this shape. False if none is."""
    global _kernel
    for kernel in (_by_flash_attention_4, _by_torch):
        if kernel is _by_flash_attention_4 and torch.cuda.get_device_capability()[0] not in _FLASH_ATTENTION_4:
            continue
        if _is_right(kernel, heads, kv_heads, head_dim):
            _kernel = kernel
            return True
    return False


def _window_mask(tokens: int, window: int | None) -> Tensor | None:
    """[tokens, tokens], true where a token attends; None if the window covers the sequence."""
    if window is None or tokens <= window:
        return None
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    return (distance >= 0) & (distance < window)


@functools.cache
def _is_right(kernel: Callable[..., Tensor], heads: int, kv_heads: int, head_dim: int) -> bool:
    """Compare a kernel with attention in float32, forward and backward, on sequences of three lengths."""
    lengths = [5, 130, 1]
    generator = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(sum(lengths), count, head_dim, device="cuda", generator=generator)
        for count in (heads, kv_heads, kv_heads)
    ]
    bounds = torch.tensor([0, 5, 135, 136], dtype=torch.int32, device="cuda")
    try:
        query, key, value = rounded = [each.bfloat16().requires_grad_() for each in given]
        found = [kernel(query, key, value, bounds, 256, None, None)]
        found += torch.autograd.grad(found[0].float().square().sum(), rounded)
        query, key, value = exact = [each.detach().float().requires_grad_() for each in rounded]
        expected = [_one_by_one(query, key, value, lengths)]
        expected += torch.autograd.grad(expected[0].square().sum(), exact)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a kernel that is compiled here raises any type of exception
        log.warning("an attention kernel for packed sequences failed", kernel=kernel.__name__, error=str(error))
        return False
    errors = [
        float((ours.detach().float() - theirs.detach()).abs().max() / theirs.detach().abs().max())
        for ours, theirs in zip(found, expected, strict=True)
    ]
    is_exact = all(error <= _TOLERANCE for error in errors)  # not max(), which may pass over NaN
    if not is_exact:
        log.warning("an attention kernel for packed sequences is inexact", kernel=kernel.__name__, errors=errors)
    return is_exact


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scaling: float | None = None,
    window: int | None = None,
) -> Tensor:
    """[T, heads, D]: a call for each sequence."""
    outputs = []
    for sequence in zip(*(each.transpose(0, 1).split(lengths, dim=1) for each in (query, key, value)), strict=True):
        q, k, v = (each[None] for each in sequence)
        mask = _window_mask(q.shape[2], window)
        shared = query.shape[1] != key.shape[1]
        outputs.append(
            scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=shared)
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)
