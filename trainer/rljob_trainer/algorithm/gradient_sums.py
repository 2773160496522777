"""Adds the gradients of matrices to their float32 sums where they are computed.

Autograd would round the gradient of a bfloat16 matrix to bfloat16, write it, and read it again to add it. Here the
product of a backward pass is added to the sum by the kernel that computes it, unrounded, as in Megatron's fusion of
gradient accumulation: in each micro-batch 8 bytes for each parameter instead of 12, and no gradient beside its sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SumOf = Callable[[], Tensor | None]
"""Returns a sum in the shape of its matrix, float32, to be changed in place; None: its gradients are dropped."""

_sums: dict[int, SumOf] = {}
"""By the address of the matrix: compiled code has tensors that are equal to the parameter, but not the same object."""


@contextmanager
def adding_to(sums: Mapping[int, SumOf]) -> Iterator[None]:
    """Within the block, backward passes add the gradients of matrices to `sums`, by address (`Tensor.data_ptr`)."""
    _sums.update(sums)
    try:
        yield
    finally:
        _sums.clear()


def is_summed(matrix: Tensor) -> bool:
    """True if the gradient of `matrix` goes to a sum, and so is not returned to autograd."""
    return matrix.data_ptr() in _sums


def add_product(matrix: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to the sum of `matrix`, whose shape and dtype it has."""
    total = _sum_of(matrix)
    if total is None:
        return
    if total.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def sum_matrices(model: nn.Module) -> None:
    """Let the linear layers and embeddings of `model` add the gradients of their matrices to sums.

    Only those that are trained and not in float32, which autograd adds up exactly.
    """
    for module in model.modules():
        summed = _SUMMED.get(type(module))
        if summed is not None and module.weight.requires_grad and module.weight.dtype != torch.float32:
            module.__class__ = summed


class _SummedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _Linear.apply(input, self.weight, self.bias)
        return output


class _SummedEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _Embedding.apply(input, self.weight, self.padding_idx)
        return output


_SUMMED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: _SummedLinear, nn.Embedding: _SummedEmbedding}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        bias_grad = output_grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        return _linear_backward(output_grad, inputs, weight), None, bias_grad


@torch.library.custom_op("rljob::linear_backward", mutates_args=())
def _linear_backward(output_grad: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """Gradient of `inputs`. One operator with the change of the sum, so that the compiler keeps and reads neither."""
    rows = output_grad.flatten(0, -2)
    add_product(weight, rows.T, inputs.flatten(0, -2))
    return (rows @ weight).view(inputs.shape)


@_linear_backward.register_fake
def _(output_grad: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    return output_grad.new_empty(inputs.shape)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_id: int | None) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.padding_id = padding_id
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight = ctx.saved_tensors
        if (total := _sum_of(weight)) is not None:
            rows = output_grad.flatten(0, -2).float()
            if ctx.padding_id is not None:
                rows = rows * (ids.flatten() != ctx.padding_id)[:, None]
            # Sorted by row, unlike index_add_, whose result would depend on the order of threads.
            total.index_put_((ids.flatten(),), rows, accumulate=True)
        return None, None, None


def _sum_of(matrix: Tensor) -> Tensor | None:
    """Raises `RuntimeError` outside of `adding_to`, where a gradient would be lost."""
    sum_of = _sums.get(matrix.data_ptr())
    if sum_of is None:
        raise RuntimeError(
            f"expected a sum for the gradient of a matrix of shape {list(matrix.shape)}, found none; run the backward "
            "pass within Gradients.added_up"
        )
    return sum_of()
