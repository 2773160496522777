"""Log-probability and entropy of each token, without storing the [tokens, vocabulary] logits.

With a vocabulary of 150,000, the float32 logits of 16,000 tokens take 9 GiB, and their gradient as much again. Here the
logits exist for one chunk of tokens at a time: forward keeps two numbers per token, backward recomputes the logits of
each chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rljob_api.memory_failure import Activity
from rljob_trainer.activities import activity
from rljob_trainer.algorithm.gradient_sums import add_product, is_summed


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` and entropy of the distribution `softmax(hidden @ weight.T / temperature)`.

    `hidden`: [T, H]. `weight`: [V, H], of the same dtype. `targets`: [T], int64. Returns two float32 tensors of [T], in
    nats; gradients flow through both to `hidden` and `weight`. At most `chunk_tokens` × V logits exist at a time. The
    softmax is computed in float32 for inputs of any dtype.

    With p = softmax(z): ∂ log p[target] / ∂z = onehot − p, and ∂ entropy / ∂z = −p · (log p + entropy).
    """
    with activity(Activity.LOGITS):
        logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk_tokens)
    return logprobs, entropy


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        distribution = fused(_distribution) if hidden.is_cuda else _distribution
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, normalizers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in _chunks(len(targets), chunk_tokens):
            logits = _float32_matmul(hidden[rows], weight.T)
            logprobs[rows], entropy[rows], normalizers[rows] = distribution(logits, targets[rows], temperature)
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @activity(Activity.LOGITS)
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers, entropy = ctx.saved_tensors
        logprobs_grad, entropy_grad = output_grads
        logits_grad = fused(_logits_grad) if hidden.is_cuda else _logits_grad
        hidden_grad = torch.empty_like(hidden)
        weight_grad = None
        adds = ctx.needs_input_grad[1] and is_summed(weight)
        if ctx.needs_input_grad[1] and not adds:  # not if the head is frozen
            # Chunks are summed in float32: in bfloat16, later ones would be lost to rounding.
            weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _chunks(len(targets), ctx.chunk_tokens):
            grad = logits_grad(
                _float32_matmul(hidden[rows], weight.T),
                targets[rows],
                normalizers[rows],
                entropy[rows],
                None if logprobs_grad is None else logprobs_grad[rows],
                None if entropy_grad is None else entropy_grad[rows],
                ctx.temperature,
                weight.dtype,
            )
            torch.mm(grad, weight, out=hidden_grad[rows])
            if adds:
                add_product(weight, grad.T, hidden[rows])
            elif weight_grad is not None:
                weight_grad += grad.T @ hidden[rows]
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None, None


def _distribution(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target, entropy, and logarithm of the normalizer, for a chunk of C tokens; each [C]."""
    scaled = logits / temperature
    normalizer = scaled.logsumexp(1)
    log_softmax = scaled - normalizer[:, None]
    return log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(1), normalizer


def _logits_grad(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    logprobs_grad: Tensor | None,
    entropy_grad: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits of a chunk, [C, V] in `dtype`, from the gradients of log-probability and entropy."""
    log_softmax = logits / temperature - normalizer[:, None]
    softmax = log_softmax.exp()
    grad = torch.zeros_like(logits)
    if logprobs_grad is not None:
        target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
        grad = logprobs_grad[:, None] * (target.to(softmax.dtype) - softmax)
    if entropy_grad is not None:
        grad = grad - entropy_grad[:, None] * softmax * (log_softmax + entropy[:, None])
    return (grad / temperature).to(dtype)


@functools.cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on first use, since importing the compiler takes seconds.

    Over the logits, the fused kernel makes one or two passes instead of a dozen, which halves the time of the head on a
    GPU.
    """
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def _float32_matmul(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


def _chunks(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, tokens, chunk_tokens):
        yield slice(start, start + chunk_tokens)
