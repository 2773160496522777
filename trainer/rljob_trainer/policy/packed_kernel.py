"""Attention by kernels for packed sequences, to each sequence itself and to the one that it continues. On a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rljob_trainer.algorithm.logprobs import fused
from rljob_trainer.algorithm.packing import Sizes
from rljob_trainer.policy import flash_attention_2
from rljob_trainer.policy.flash_attention_2 import Pairing

causal_kernel: ModuleType = flash_attention_2
"""The module with the kernel for attention to a sequence itself, without a window."""

can_share_prompts = True
"""False if attention to shared prompts failed or differed: prompts are then repeated."""


# Opaque for the compiler, so that layers are compiled once for all packings, with prompts that are shared and without.
@torch.library.custom_op("rljob::packed_attention", mutates_args={})
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    prompt_bounds: Tensor,
    response_bounds: Tensor,
    sizes: Tensor,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Output, [T, heads, D], and the logarithm of the sum of the exponentials of all scores, [heads, T] float32.

    The kernel attends from all sequences that continue a prompt to that prompt, as from a single sequence. Both parts
    of their attention are added with their shares of the whole softmax, as in arXiv 2310.01889. `window`: 0 for none.
    """
    tokens, kernel = Sizes(*sizes.tolist()), flash_attention_2 if window else causal_kernel
    own = Pairing(bounds, bounds, tokens.longest, tokens.longest, window)
    output, normalizers = kernel.forward(query, key, value, own, scaling)
    if tokens.first < tokens.last:
        rows, prompts = slice(tokens.first, tokens.last), slice(tokens.prompts)
        shared = Pairing(response_bounds, prompt_bounds, tokens.longest_responses, tokens.longest_prompt, None)
        of_prompts = flash_attention_2.forward(query[rows], key[prompts], value[prompts], shared, scaling)
        merge = fused(_merge) if query.is_cuda else _merge
        normalizers[:, rows] = merge(output[rows], normalizers[:, rows], *of_prompts)
    return output.contiguous(), normalizers.contiguous()


@attend.register_fake
def _(query: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("rljob::packed_attention_backward", mutates_args={})
def attend_backward(
    output_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    prompt_bounds: Tensor,
    response_bounds: Tensor,
    sizes: Tensor,
    output: Tensor,
    normalizers: Tensor,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value: with output and normalizer of the whole softmax, those of its parts add up."""
    tokens, kernel = Sizes(*sizes.tolist()), flash_attention_2 if window else causal_kernel
    own = Pairing(bounds, bounds, tokens.longest, tokens.longest, window)
    whole = output_grad, query, key, value, output, normalizers
    query_grad, key_grad, value_grad = (grad.contiguous() for grad in kernel.backward(*whole, own, scaling))
    if tokens.first < tokens.last:
        rows, prompts = slice(tokens.first, tokens.last), slice(tokens.prompts)
        part = output_grad[rows], query[rows], key[prompts], value[prompts], output[rows]
        shared = Pairing(response_bounds, prompt_bounds, tokens.longest_responses, tokens.longest_prompt, None)
        of_prompts = flash_attention_2.backward(*part, normalizers[:, rows].contiguous(), shared, scaling)
        whole_grads = query_grad[rows], key_grad[prompts], value_grad[prompts]
        for grad, of_prompt in zip(whole_grads, of_prompts, strict=True):
            grad += of_prompt
    return query_grad, key_grad, value_grad


@attend_backward.register_fake
def _(_output_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.scaling, ctx.window = inputs[7:]


def _differentiate(ctx: Any, output_grad: Tensor, _normalizers_grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = attend_backward(output_grad.contiguous(), *ctx.saved_tensors, ctx.scaling, ctx.window)
    return *grads, *[None] * 6


attend.register_autograd(_differentiate, setup_context=_keep)


def _merge(output: Tensor, normalizers: Tensor, other: Tensor, other_normalizers: Tensor) -> Tensor:
    """Make `output`, [R, heads, D], that of a softmax over the scores of both. Returns its normalizers, [heads, R]."""
    total = torch.logaddexp(normalizers, other_normalizers)
    shares = [(each - total).exp().T[:, :, None] for each in (normalizers, other_normalizers)]
    output.copy_(output * shares[0] + other * shares[1])
    return total
