"""AdamW with float32 masters, in buckets. `optimizer_offload`: the share of its state that is in host memory.

Bytes of one parameter, with moments in float32 (bfloat16, int8, whose blocks have scales):

| parameters                    | on the device        | with offload: device | host           |
|-------------------------------|----------------------|----------------------|----------------|
| bfloat16 weight               | 2                    | 2                    |                |
| remainder of the master       | 2                    |                      | 2              |
| two moments                   | 8 (4, 2.03)          |                      | 8 (4, 2.03)    |
| gradient, during an update    | 4                    | 4                    |                |
| together                      | 16 (12, 10.03)       | 6                    | 10 (6, 4.03)   |

Float32 weights, as FSDP shards them, are masters themselves: 16 (12, 10.03) on the device, or 8 there and 8 (4, 2.03)
on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.gradients import Gradients, local
from rljob_trainer.policy.model import PolicyModel
from rljob_trainer.policy.moments import MOMENTS, BucketStep, moment_type
from rljob_trainer.policy.optimizer_state import OptimizerState, State, joined, split

BUCKET_ELEMENTS = 1 << 25
"""Parameters of a bucket: with float32 moments, 320 MiB of state. Long enough for copies at full speed, short enough
that three buckets are no peak of their own."""

_EPSILON = 1e-8
"""AdamW's epsilon."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a parameter that lies in a bucket."""

    parameter: int
    of_shard: slice
    """Elements of the parameter's local shard."""
    of_bucket: slice
    """The same elements in the bucket."""
    with_gap: slice
    """`of_bucket`, and the elements after it that belong to no parameter and are zero."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    elements: slice
    """Elements of the state's arrays."""
    pieces: list[_Piece]
    split: bool
    """Its weights are bfloat16."""


class MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) over the trainable parameters of `model`, which must be on their device.

    The same gradients give bit-identical results for any share of the state in host memory. The state is allocated at
    the start, so a lack of memory shows at once.
    """

    def __init__(
        self,
        model: PolicyModel,
        config: PolicyConfig,
        remainders: dict[str, Tensor],
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        """`remainders`: those of the bfloat16 parameters whose initial masters are not bfloat16 numbers, by name;
        int16, of the shape of the local shard."""
        self._config = config
        self.parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._decays = _decays(model, self.parameters.values())
        self._numbers = {name: number for number, name in enumerate(self.parameters)}
        locals_ = self._locals()
        self._device = torch.device(config.device)
        self.moments = moment_type(config.moments, self._device)
        alignment = self.moments.alignment
        self._starts = [0, *itertools.accumulate(_aligned(each.numel(), alignment) for each in locals_)]
        self._buckets = _plan_buckets(locals_, _aligned(bucket_elements, alignment), alignment)
        self.gradients = Gradients(list(self.parameters.values()))
        self.state = OptimizerState(
            self._starts,
            self._device,
            self.moments.dtype,
            split=any(bucket.split for bucket in self._buckets),
            offload=config.memory.optimizer_offload,
        )
        self.steps = 0
        """Optimizer steps so far."""
        self.learning_rate = config.algorithm.learning_rate
        self.before_step: Callable[[], None] = lambda: None
        """Called before the state changes."""
        self.after_step: Callable[[], None] = lambda: None
        self.weights_on_host: Mapping[str, Tensor] = {}
        """Local shards in host memory, by name: of all parameters while the device has none of them."""
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
        """`exp_avg`, `exp_avg_sq`, and `remainders` of a bfloat16 parameter: views of the shape of its local shard.

        If the moments are codes, also `exp_avg_scales` and `exp_avg_sq_scales`, one-dimensional.
        """
        number, shard = self._numbers[name], local(self.parameters[name])
        elements = slice(self._starts[number], self._starts[number + 1])
        found: dict[str, Tensor] = {}
        for key, part in self.state.of(elements).items():
            if key.endswith("_scales"):
                found[key] = part
            elif key != "remainders" or shard.dtype == torch.bfloat16:
                found[key] = part[: shard.numel()].view(shard.shape)
        return found

    def weights_of(self, name: str) -> Tensor:
        """The local shard, [rows, …], of a parameter, to be read: on its device, or in host memory while that has
        none."""
        on_host = self.weights_on_host.get(name)
        return local(self.parameters[name]) if on_host is None else on_host

    def _locals(self) -> list[Tensor]:
        """The local shards, flat. Not kept: FSDP replaces them before its first pass."""
        return [local(parameter).view(-1) for parameter in self.parameters.values()]

    def _step_bucket(self, number: int, state: State, flat: list[Tensor]) -> None:
        bucket = self._buckets[number]
        changed = [each for each in bucket.pieces if self._gradient(each) is not None]
        if not changed:
            return
        weights = [flat[each.parameter][each.of_shard] for each in bucket.pieces]
        masters = weights
        if bucket.split:
            rounded = weights[0].new_zeros(bucket.elements.stop - bucket.elements.start)
            torch._foreach_copy_([rounded[each.of_bucket] for each in bucket.pieces], weights)
            whole = joined(rounded, state["remainders"])
            masters = [whole[each.of_bucket] for each in bucket.pieces]
        moments = self.moments.read(state)
        for decays, weight_decay in ((True, self._config.algorithm.weight_decay), (False, 0.0)):
            chosen = [
                (master, gradient, *(moments[moment][each.of_bucket] for moment in MOMENTS))
                for each, master in zip(bucket.pieces, masters, strict=True)
                if self._decays[each.parameter] is decays and (gradient := self._gradient(each)) is not None
            ]
            if chosen:
                self._adamw(*map(list, zip(*chosen, strict=True)), weight_decay=weight_decay)
        if bucket.split:
            rounded, remainders = split(whole)
            torch._foreach_copy_(weights, [rounded[each.of_bucket] for each in bucket.pieces])
            state["remainders"].copy_(remainders)
        at = BucketStep(self._config.algorithm.seed, self.steps, number, len(self._buckets), bucket.elements.start)
        self.moments.keep(state, moments, [each.with_gap for each in changed], at)

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
            beta1=self._config.algorithm.adam_beta1,
            beta2=self._config.algorithm.adam_beta2,
            weight_decay=weight_decay,
            eps=_EPSILON,
            amsgrad=False,
            maximize=False,
        )

    def _gradient(self, piece: _Piece) -> Tensor | None:
        grad = self.gradients.of(piece.parameter)
        return None if grad is None else grad[piece.of_shard]


def _decays(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[bool]:
    """True for each parameter to which weight decay applies: matrices, without embeddings (a tied head is one)."""
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    return [parameter.dim() >= 2 and id(parameter) not in embeddings for parameter in parameters]


def _aligned(elements: int, alignment: int) -> int:
    return -(-elements // alignment) * alignment


def _plan_buckets(shards: list[Tensor], most: int, alignment: int) -> list[_Bucket]:
    """The flat shards in order, cut into buckets of at most `most` elements of one dtype, a multiple of `alignment`."""
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
            length, at = min(room, shard.numel() - start), position - last.elements.start
            end = at + _aligned(length, alignment)
            piece = _Piece(number, slice(start, start + length), slice(at, at + length), slice(at, end))
            position, start = last.elements.start + end, start + length
            buckets[-1] = _Bucket(slice(last.elements.start, position), [*last.pieces, piece], is_split)
    return buckets
