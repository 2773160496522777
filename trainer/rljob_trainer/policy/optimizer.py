"""AdamW with float32 masters, in buckets. Its state is on the device, or in host memory (`optimizer_offload`).

Bytes of one parameter, with moments in float32 (bfloat16):

| parameters                    | on the device        | with offload: device | host   |
|-------------------------------|----------------------|----------------------|--------|
| bfloat16 weight               | 2                    | 2                    |        |
| remainder of the master       | 2                    |                      | 2      |
| two moments                   | 8 (4)                |                      | 8 (4)  |
| gradient, during an update    | 4                    | 4                    |        |
| together                      | 16 (12)              | 6                    | 10 (6) |

Float32 weights, as FSDP shards them, are masters themselves: 16 (12) on the device, or 8 there and 8 (4) on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.float32_masters import joined, split, stochastically_rounded
from rljob_trainer.policy.gradients import Gradients, local
from rljob_trainer.policy.model import PolicyModel
from rljob_trainer.policy.optimizer_state import BucketState, OptimizerState

BUCKET_ELEMENTS = 1 << 25
"""Parameters of a bucket: with float32 moments, 320 MiB of state. Long enough for copies at full speed, short enough
that three buckets are no peak of their own."""

_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a parameter that lies in a bucket: `length` elements from `start` of its local shard."""

    parameter: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    elements: slice
    """Of the state's arrays."""
    pieces: list[_Piece]
    split: bool
    """Its weights are bfloat16."""


class MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) over the trainable parameters of `model`, which must be on their device.

    The same gradients give the same bits, wherever the state is. It exists from the start, so that a shortage of memory
    shows then.
    """

    def __init__(
        self,
        model: PolicyModel,
        config: PolicyConfig,
        remainders: dict[str, Tensor],
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        """`remainders`: of the bfloat16 parameters whose initial masters are not bfloat16 numbers, by name; int16, of
        the shape of the local shard."""
        self._config = config
        self.parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._decays = _decays(model, self.parameters.values())
        self._numbers = {name: number for number, name in enumerate(self.parameters)}
        locals_ = self._locals()
        self._starts = [0, *itertools.accumulate(each.numel() for each in locals_)]
        self._buckets = _plan_buckets(locals_, bucket_elements)
        self.gradients = Gradients(list(self.parameters.values()))
        self.state = OptimizerState(
            self._starts[-1],
            torch.device(config.device),
            getattr(torch, config.moments),
            split=any(bucket.split for bucket in self._buckets),
            offload=config.memory.optimizer_offload,
        )
        self.steps = 0
        """Optimizer steps so far."""
        self.learning_rate = config.learning_rate
        self.before_step: Callable[[], None] = lambda: None
        """Called before the state changes."""
        self.after_step: Callable[[], None] = lambda: None
        for name, values in remainders.items():
            self.state_of(name)["remainders"].copy_(values)

    def step(self) -> None:
        """Apply the gradients. After an error, some parameters may be changed and others not."""
        self.before_step()
        self.steps += 1
        flat = self._locals()
        self.state.each(
            [bucket.elements for bucket in self._buckets],
            lambda number, state: self._step_bucket(number, state, flat),
        )
        self.after_step()

    def state_of(self, name: str) -> dict[str, Tensor]:
        """`exp_avg`, `exp_avg_sq`, and `remainders` of a bfloat16 parameter: views of the shape of its local shard."""
        number, shard = self._numbers[name], local(self.parameters[name])
        whole = self.state.arrays()
        views = {"exp_avg": whole.exp_avg, "exp_avg_sq": whole.exp_avg_sq}
        if whole.remainders is not None and shard.dtype == torch.bfloat16:
            views["remainders"] = whole.remainders
        elements = slice(self._starts[number], self._starts[number + 1])
        return {key: array[elements].view(shard.shape) for key, array in views.items()}

    def master_pieces(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """The float32 master of a parameter's local shard, on its device, in pieces of at most a bucket.

        With each piece, the range of the flattened shard that it covers. Read a piece before the next update.
        """
        weights = local(self.parameters[name]).view(-1)
        remainders = self.state_of(name).get("remainders")
        for start in range(0, weights.numel(), BUCKET_ELEMENTS):
            piece = slice(start, min(start + BUCKET_ELEMENTS, weights.numel()))
            if remainders is None:
                yield piece, weights[piece]
            else:
                yield piece, joined(weights[piece], remainders.view(-1)[piece].to(weights.device))

    def is_split(self, name: str) -> bool:
        """True if the parameter is a bfloat16 weight, whose master consists of it and a remainder."""
        return self.parameters[name].dtype == torch.bfloat16

    def master_on_host(self, name: str) -> Tensor:
        """The float32 master of a split parameter, as a new tensor in host memory. Uses no memory on the device."""
        weights = local(self.parameters[name]).cpu()
        return joined(weights, self.state_of(name)["remainders"].cpu())

    def set_master(self, name: str, master: Tensor) -> None:
        """Set weight and remainder from `master` (float32, of the shape of the local shard, on any device)."""
        weights = local(self.parameters[name]).view(-1)
        remainders = self.state_of(name).get("remainders")
        for start in range(0, weights.numel(), BUCKET_ELEMENTS):
            piece = slice(start, min(start + BUCKET_ELEMENTS, weights.numel()))
            values = master.view(-1)[piece].to(weights.device)
            if remainders is None:
                weights[piece].copy_(values)
            else:
                rounded, rest = split(values)
                weights[piece].copy_(rounded)
                remainders.view(-1)[piece].copy_(rest)

    def _locals(self) -> list[Tensor]:
        """The local shards, flat. Not kept: FSDP replaces them before its first pass."""
        return [local(parameter).view(-1) for parameter in self.parameters.values()]

    def _step_bucket(self, number: int, state: BucketState, flat: list[Tensor]) -> None:
        bucket = self._buckets[number]
        weights = [flat[each.parameter][each.start : each.start + each.length] for each in bucket.pieces]
        if bucket.split:
            assert state.remainders is not None
            masters = joined(torch.cat(weights), state.remainders)
        exp_avg, exp_avg_sq = state.exp_avg.float(), state.exp_avg_sq.float()
        lengths = [each.length for each in bucket.pieces]
        of_pieces = zip(
            masters.split(lengths) if bucket.split else weights,
            map(self._gradient, bucket.pieces),
            exp_avg.split(lengths),
            exp_avg_sq.split(lengths),
            [self._decays[each.parameter] for each in bucket.pieces],
            strict=True,
        )
        with_gradient = [each for each in of_pieces if each[1] is not None]
        if not with_gradient:
            return
        for decays, weight_decay in ((True, self._config.weight_decay), (False, 0.0)):
            if chosen := [each[:4] for each in with_gradient if each[4] is decays]:
                self._adamw(*map(list, zip(*chosen, strict=True)), weight_decay=weight_decay)
        if bucket.split:
            assert state.remainders is not None
            rounded, remainders = split(masters)
            torch._foreach_copy_(weights, list(rounded.split(lengths)))
            state.remainders.copy_(remainders)
        if state.exp_avg.dtype != torch.float32:
            generator = self._generator(number)
            state.exp_avg.copy_(stochastically_rounded(exp_avg, generator))
            state.exp_avg_sq.copy_(stochastically_rounded(exp_avg_sq, generator))

    def _adamw(
        self,
        masters: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        *,
        weight_decay: float,
    ) -> None:
        # The kernel reads the number of the step on the device, and does not change it.
        step = torch.tensor(float(self.steps), device=masters[0].device)
        torch._fused_adamw_(
            masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step] * len(masters),
            lr=self.learning_rate,
            beta1=self._config.adam_beta1,
            beta2=self._config.adam_beta2,
            weight_decay=weight_decay,
            eps=_EPSILON,
            amsgrad=False,
            maximize=False,
        )

    def _gradient(self, piece: _Piece) -> Tensor | None:
        grad = self.gradients.of(piece.parameter)
        return None if grad is None else grad[piece.start : piece.start + piece.length]

    def _generator(self, bucket: int) -> torch.Generator:
        """Of a step and a bucket, so that a replayed step repeats its random numbers."""
        generator = torch.Generator(self._config.device)
        return generator.manual_seed(self._config.seed + self.steps * len(self._buckets) + bucket)


def _decays(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[bool]:
    """True for each parameter to which weight decay applies: matrices, without embeddings (a tied head is one)."""
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    return [parameter.dim() >= 2 and id(parameter) not in embeddings for parameter in parameters]


def _plan_buckets(shards: list[Tensor], most: int) -> list[_Bucket]:
    """The flat shards in order, cut into buckets of at most `most` elements of one dtype."""
    buckets: list[_Bucket] = []
    position = 0
    for number, shard in enumerate(shards):
        is_split, start = shard.dtype == torch.bfloat16, 0
        while start < shard.numel():
            last = buckets[-1] if buckets and buckets[-1].split == is_split else None
            room = most - (last.elements.stop - last.elements.start) if last else 0
            if last is None or not room:
                last, room = _Bucket(slice(position, position), [], is_split), most
                buckets.append(last)
            length = min(room, shard.numel() - start)
            piece, elements = _Piece(number, start, length), slice(last.elements.start, position + length)
            buckets[-1] = _Bucket(elements, [*last.pieces, piece], is_split)
            position, start = position + length, start + length
    return buckets
