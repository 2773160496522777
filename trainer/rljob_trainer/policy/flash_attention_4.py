"""FlashAttention 4 over packed sequences, for Hopper and Blackwell GPUs: the copy of its kernels that vLLM contains.

torch's own kernel is FlashAttention 2, which uses a third of a Hopper GPU's arithmetic. torch 2.11 can register version
4 as well, but refuses the backward pass of causal packed sequences.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rljob_trainer.policy.flash_attention_2 import Pairing


def kernels() -> Any:
    """The module with the kernels. Raises `ImportError` without vLLM for CUDA and its CUTLASS DSL."""
    from rljob_trainer.policy.cute_kernels import interface

    return interface


def forward(query: Tensor, key: Tensor, value: Tensor, pairing: Pairing, scaling: float) -> tuple[Tensor, Tensor]:
    """Output and normalizers, like `flash_attention_2.forward`, with a window of 0."""
    output, normalizers, *_ = kernels()._flash_attn_fwd(
        query, key, value, return_lse=True, **_options(pairing, scaling)
    )
    return output, normalizers


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
    """Gradients of query, key and value, with a window of 0."""
    grads: tuple[Tensor, Tensor, Tensor] = kernels()._flash_attn_bwd(
        query, key, value, output, output_grad, normalizers, **_options(pairing, scaling)
    )
    return grads


def _options(pairing: Pairing, scaling: float) -> dict[str, Any]:
    assert pairing.window == 0, "only causal attention was tried"
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return {**dict(zip(names, pairing, strict=False)), "causal": True, "softmax_scale": scaling}
