"""Log-probability and entropy of each token without ever holding the [tokens, vocabulary] logits.

At a vocabulary of 150,000 the float32 logits of 16,000 tokens are 9 GiB, and their gradient as much again. Here the
logits live for one chunk of tokens at a time: forward keeps two numbers a token, backward computes the chunk's logits
anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` and entropy of the distribution `softmax(hidden @ weight.T / temperature)`.

    `hidden`: [T, H]. `weight`: [V, H], of the same dtype. `targets`: [T], int64. Returns two float32 tensors of [T], in
    nats; gradients flow through both to `hidden` and `weight`. At most `chunk_tokens` × V logits exist at a time. The
    softmax is float32 whatever the dtype of the inputs.

    With p = softmax(z): ∂ log p[target] / ∂z = onehot − p, and ∂ entropy / ∂z = −p · (log p + entropy).
    """
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk_tokens)
    return logprobs, entropy


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, normalizers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in _chunks(len(targets), chunk_tokens):
            logits = _float32_matmul(hidden[rows], weight.T).div_(temperature)
            normalizers[rows] = logits.logsumexp(1)
            log_softmax = logits.sub_(normalizers[rows, None])
            logprobs[rows] = log_softmax.gather(1, targets[rows, None]).squeeze(1)
            entropy[rows] = -torch.linalg.vecdot(log_softmax.exp(), log_softmax)
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers, entropy = ctx.saved_tensors
        logprobs_grad, entropy_grad = output_grads
        hidden_grad = torch.empty_like(hidden)
        # Chunks are summed in float32: in bfloat16 the later ones would be rounded away.
        weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _chunks(len(targets), ctx.chunk_tokens):
            logits = _float32_matmul(hidden[rows], weight.T).div_(ctx.temperature)
            log_softmax = logits.sub_(normalizers[rows, None])
            logits_grad = _logits_grad(
                log_softmax,
                targets[rows],
                entropy[rows],
                None if logprobs_grad is None else logprobs_grad[rows] / ctx.temperature,
                None if entropy_grad is None else entropy_grad[rows] / ctx.temperature,
            ).to(weight.dtype)
            torch.mm(logits_grad, weight, out=hidden_grad[rows])
            weight_grad += logits_grad.T @ hidden[rows]
        return hidden_grad, weight_grad.to(weight.dtype), None, None, None


def _logits_grad(
    log_softmax: Tensor, targets: Tensor, entropy: Tensor, logprobs_grad: Tensor | None, entropy_grad: Tensor | None
) -> Tensor:
    """Gradient of the logits, [C, V] float32; may overwrite `log_softmax`."""
    if entropy_grad is None:
        grad = log_softmax.exp_()
        factor: Tensor | None = None
    else:
        grad = log_softmax.exp()
        factor = log_softmax.add_(entropy[:, None]).mul_(-entropy_grad[:, None])
    if logprobs_grad is None:
        return grad.zero_() if factor is None else grad.mul_(factor)
    if factor is None:
        grad.mul_(-logprobs_grad[:, None])
    else:
        grad.mul_(factor.sub_(logprobs_grad[:, None]))
    return grad.scatter_add_(1, targets[:, None], logprobs_grad[:, None])


def _float32_matmul(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).float()


def _chunks(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, tokens, chunk_tokens):
        yield slice(start, start + chunk_tokens)
