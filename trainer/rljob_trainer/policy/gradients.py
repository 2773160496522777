"""The gradients of an update, in float32: the sum over its micro-batches, and the norm over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rljob_trainer.algorithm.gradient_sums import adding_to


class Gradients:
    """Sums of gradients by parameter. Autograd accumulates the gradients of float32 parameters itself. With a bfloat16
    parameter, small gradients would be lost to rounding: each of its gradients is added to a float32 sum and freed as
    soon as the backward pass has produced it, or never exists beside the sum (`gradient_sums`).
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._sums = _Sums()
        for number, parameter in enumerate(parameters):
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(_adder(self._sums, number))

    def of(self, number: int) -> Tensor | None:
        """The gradient of a parameter, or of this rank's shard, [elements]; None if it has none."""
        if number in self._sums:
            return self._sums[number]
        grad = self._parameters[number].grad
        return None if grad is None else local(grad).reshape(-1)

    def all(self) -> list[Tensor]:
        """The gradients that exist: [elements] each, as `of` returns them."""
        return [grad for number in range(len(self._parameters)) if (grad := self.of(number)) is not None]

    def norm(self) -> float:
        """L2 norm over all parameters and ranks. Collective if parameters are sharded."""
        total = torch.nn.utils.get_total_norm([grad for grad in self.all() if grad.numel()])
        if mesh := next((each.device_mesh for each in self._parameters if isinstance(each, DTensor)), None):
            squared = total.to(self._device()) ** 2
            dist.all_reduce(squared, group=_shard_group(mesh))
            total = squared.sqrt()
        return float(total)

    def clip(self, norm: float, max_norm: float, normalizer: int = 1) -> None:
        """Divide the gradients by `normalizer`, after which their norm is `norm`, and scale them to a norm of at most
        `max_norm`."""
        scale = min(max_norm / (norm + 1e-6), 1.0)  # as torch.nn.utils.clip_grad_norm_
        if scale < 1.0 or normalizer > 1:
            torch._foreach_mul_(self.all(), scale / normalizer)

    def added_up(self) -> AbstractContextManager[None]:
        """Within the block, backward passes add to the sums."""
        return adding_to(
            {
                parameter.data_ptr(): partial(self._sum_of, number)
                for number, parameter in enumerate(self._parameters)
                if parameter.dtype != torch.float32
            }
        )

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Drop each gradient of the block as soon as the backward pass has produced it."""
        self._sums.closed = True
        hooks = [each.register_post_accumulate_grad_hook(_drop) for each in self._parameters]
        try:
            yield
        finally:
            self._sums.closed = False
            for hook in hooks:
                hook.remove()

    def clear(self) -> None:
        self._sums.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def _sum_of(self, number: int) -> Tensor | None:
        """The sum of a parameter in its shape, zeros at first; None while gradients are dropped."""
        if self._sums.closed:
            return None
        parameter = self._parameters[number]
        if number not in self._sums:
            self._sums[number] = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        return self._sums[number].view(parameter.shape)

    def _device(self) -> torch.device:
        return local(self._parameters[0]).device


class _Sums(dict[int, Tensor]):
    """Sums of gradients by the number of the parameter."""

    closed = False
    """Nothing is added."""


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _adder(sums: _Sums, number: int) -> Callable[[Tensor], None]:
    """A hook that moves a parameter's gradient into `sums`. It holds nothing that would keep the parameter alive."""

    def add(parameter: Tensor) -> None:
        if sums.closed or parameter.grad is None:  # the gradient of a matrix may be in its sum already
            return
        grad, parameter.grad = local(parameter.grad).reshape(-1), None
        if number in sums:
            sums[number].add_(grad)
        else:
            sums[number] = grad.float()

    return add


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor of any shape, on all ranks (collective); any other tensor itself. Detached."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


def gathered(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The whole of each tensor in `dtype`, detached, on all ranks. One collective for all that are sharded by rows.

    A tensor that is not sharded is returned itself if it needs no cast.
    """
    if not (tensors and isinstance(tensors[0], DTensor)):
        return [tensor.detach().to(dtype) for tensor in tensors]
    group = _shard_group(tensors[0].device_mesh)
    ranks = dist.get_world_size(group)
    # FSDP2 divides rows like `torch.chunk`: the last ranks may have fewer, or none.
    sizes = [-(-len(tensor) // ranks) * (tensor.numel() // len(tensor)) for tensor in tensors]
    mine = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    for part, shard in zip(mine.split(sizes), map(local, tensors), strict=True):
        part[: shard.numel()].view(shard.shape).copy_(shard)  # cast first: half the bytes to gather
    whole = torch.empty(ranks * len(mine), dtype=dtype, device=mine.device)
    dist.all_gather_into_tensor(whole, mine, group)
    parts = whole.view(ranks, -1).split(sizes, dim=1)
    return [part.reshape(-1)[: each.numel()].view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def _shard_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of the ranks that share one copy of the state. None: all ranks."""
    return mesh.get_group("shard") if mesh.ndim > 1 else None


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, [rows, …], of a sharded tensor; any other tensor in its own shape. Shares its memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    shard: Tensor = tensor.to_local().detach()
    return shard
