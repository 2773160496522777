"""FlashAttention 2 over packed sequences: torch's kernel for sequences of different lengths."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

_ASKS_FOR_SHARED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True since torch 2.12. Before, the kernel accepts fewer heads for keys and values without an argument."""


class Pairing(NamedTuple):
    """The keys that each query attends to: sequence after sequence of both, as the bounds say."""

    query_bounds: Tensor
    """[sequences + 1] int32."""

    key_bounds: Tensor
    """[sequences + 1] int32."""

    longest_query: int
    """Tokens of the longest sequence of queries, or more."""

    longest_key: int

    window: int | None
    """The last tokens that each query attends to, 0 for all before it; None: all keys of its sequence."""


def forward(query: Tensor, key: Tensor, value: Tensor, pairing: Pairing, scaling: float) -> tuple[Tensor, Tensor]:
    """Output, [queries, heads, D], and the logarithm of the sum of the exponentials of all scores, [heads, queries].

    `query`: [queries, heads, D]; `key`, `value`: [keys, KV heads, D].
    """
    options: dict[str, Any] = {"enable_gqa": True} if _ASKS_FOR_SHARED_HEADS else {}
    window_size = _window_size(pairing.window)
    asked = AuxRequest(lse=True)
    found: Any = varlen_attn(
        query, key, value, *pairing[:4], return_aux=asked, scale=scaling, window_size=window_size, **options
    )
    return found  # type: ignore[no-any-return]


def backward(
    output_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizers: Tensor,
    pairing: Pairing,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. `varlen_attn` has no way to pass the normalizers of a larger softmax."""
    left, right = _window_size(pairing.window)
    random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout of 0
    whole = output_grad, query, key, value, output, normalizers, *pairing[:4]
    grads: Any = torch.ops.torch_attn._varlen_attn_backward(
        *whole, (left, right) == (-1, 0), random_state, scale=scaling, window_size=[left, right]
    )
    return grads  # type: ignore[no-any-return]


def _window_size(window: int | None) -> tuple[int, int]:
    """Tokens to the left and right that a token attends to, −1 for all."""
    return (-1, -1) if window is None else (window - 1, 0)
