"""One step's update of the policy: forward and backward by micro-batches, then the optimizer step."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rljob_api.memory_failure import Activity
from rljob_trainer.activities import activity
from rljob_trainer.algorithm.micro_batch import (
    MicroBatch,
    completions_with_tokens,
    contributing,
    dropped_tokens,
    kept_tokens,
    loss_normalizer,
    micro_batches_of,
    rehearsal,
    split_updates,
    with_gradient,
)
from rljob_trainer.algorithms.learning_rate import learning_rate_at
from rljob_trainer.algorithms.objective import LossMetrics, policy_loss, with_effective_sample_size
from rljob_trainer.algorithms.tokens import LossFunction
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.lora import without_adapters, without_dropout
from rljob_trainer.policy.model import PolicyModel, compilations
from rljob_trainer.policy.optimizer import MasterAdamW
from rljob_trainer.rollout_batch import RolloutBatch


@dataclass(slots=True)
class PolicyUpdate:
    """Updates `model` from scored rollouts. Every rank receives the whole batch and processes its share."""

    config: PolicyConfig
    model: PolicyModel
    optimizer: MasterAdamW

    loss: LossFunction

    reference: PolicyModel | None
    """The initial model; None if the loss has no KL term. With adapters, it is `model` itself, without them."""

    device: torch.device

    after_micro_batch: Callable[[int], None]
    """Called after the backward pass of each micro-batch, with its number in the step."""

    parameters_touched: bool = False
    """Set by the first optimizer step of a run."""

    _begun: BegunUpdate | None = None
    """An update whose gradients are held, between `add` and `run`."""

    def add(self, batch: RolloutBatch) -> None:
        """Add the gradient of the next part of a step: groups of which `batch` has no others."""
        self._begun = self._begun or self._begin()
        self._add(self._begun, batch, range(len(batch.prompt_ids)), is_last=False)

    def forget(self) -> None:
        """Drop the parts that were added, and all gradients."""
        self._begun = None
        self.optimizer.gradients.clear()

    def run(self, batch: RolloutBatch, added: int = 0) -> dict[str, float]:
        """Run the updates of the step. Returns the metrics of `UpdateResult`, the same on every rank.

        `added`: the first parts of the step that were added. Raises `RuntimeError` if it was another number.
        """
        begun, self._begun = self._begun or self._begin(), None
        if begun.parts != added:
            raise RuntimeError(f"expected {added} parts of step {batch.step} in the gradients, found {begun.parts}")
        self.optimizer.learning_rate = learning_rate_at(self.config.algorithm, batch.step)
        if len(batch.parts):
            return self._run_parts(begun, batch)
        parts = split_updates(completions_with_tokens(batch), self.config.algorithm.updates_per_step)
        processed = [with_gradient(batch, part, self.config.algorithm) for part in parts]
        updates = list(zip(parts, processed, strict=True))
        # In the first update, the policy before the step is the current policy.
        later = chain.from_iterable(self.micro_batches(batch, *update) for update in updates[1:])
        old_logprobs = deque(self.logprobs(later))
        grad_norms: list[float] = []
        for place, update in enumerate(updates):
            for micro_batch, is_last in _with_last(self.micro_batches(batch, *update)):
                self._process(begun, micro_batch, old_logprobs.popleft() if place else None, is_last=is_last)
            grad_norms.append(self._optimizer_step())
        return self._metrics(begun, batch, list(chain(*processed)), grad_norms, len(updates), len(updates))

    def _run_parts(self, begun: BegunUpdate, batch: RolloutBatch) -> dict[str, float]:
        """Add the parts of the step that are missing, and normalize the sum of all."""
        algorithm, last = self.config.algorithm, int(batch.parts.max())
        for part in range(begun.parts, last + 1):
            self._add(begun, batch, np.flatnonzero(batch.parts == part).tolist(), is_last=part == last)
        completions = completions_with_tokens(batch)
        processed = with_gradient(batch, completions, algorithm)
        logprobs, of_processed = ([batch.rollout_logprobs[each] for each in part] for part in (completions, processed))
        by = loss_normalizer(logprobs, algorithm)
        return self._metrics(begun, batch, processed, [self._optimizer_step(by)], by, kept_tokens(of_processed))

    def _add(self, begun: BegunUpdate, batch: RolloutBatch, groups: Sequence[int], *, is_last: bool) -> None:
        """Add the gradient of `groups`, which is not normalized."""
        members = set(groups)
        completions = [each for each in completions_with_tokens(batch) if each // batch.group_size in members]
        processed = contributing(batch, completions, self.config.algorithm)
        if is_last and not (processed or begun.micro_batches):
            processed = with_gradient(batch, completions_with_tokens(batch), self.config.algorithm)
        begun.parts += 1
        # FSDP ends an update with its last micro-batch, even if that is empty.
        if processed or (is_last and isinstance(self.model, FSDPModule)):
            micro_batches = self.micro_batches(batch, processed, processed, normalized=False)
            for micro_batch, ends_part in _with_last(micro_batches):
                self._process(begun, micro_batch, None, is_last=is_last and ends_part)

    def _begin(self) -> BegunUpdate:
        return BegunUpdate(UpdateMetrics(detached=self.config.memory.detach_metrics), compilations())

    def _process(
        self, begun: BegunUpdate, micro_batch: MicroBatch, old_logprobs: Tensor | None, *, is_last: bool
    ) -> None:
        self._announce_backward(is_last=is_last)
        begun.metrics.add(self._backward(micro_batch, old_logprobs))
        self.after_micro_batch(begun.micro_batches)
        begun.micro_batches += 1

    def _metrics(
        self,
        begun: BegunUpdate,
        batch: RolloutBatch,
        processed: Sequence[int],
        grad_norms: Sequence[float],
        by: int,
        by_means: int,
    ) -> dict[str, float]:
        """The metrics of the step. `by`, `by_means`: see `UpdateMetrics.over_ranks`."""
        finite = [norm for norm in grad_norms if math.isfinite(norm)]
        counts = {"compilations": compilations() - begun.compiled_before}
        return {
            **with_effective_sample_size(begun.metrics.over_ranks(by, by_means, counts)),
            "grad_norm": sum(finite) / len(finite) if finite else math.nan,
            "skipped_updates": len(grad_norms) - len(finite),
            "learning_rate": self.optimizer.learning_rate,
            "tokens": batch.response_tokens,
            "dropped_tokens": dropped_tokens(batch.rollout_logprobs),
            "skipped_tokens": batch.response_tokens - sum(len(batch.response_ids[each]) for each in processed),
            "micro_batches": begun.micro_batches,
        }

    def rehearse(self) -> None:
        """Compile layers and head by running the passes of a micro-batch. Changes no state. Collective.

        Only one layer of each kind runs, so it takes little memory. The number of tokens is realistic, because the
        compiler chooses kernels by it.
        """
        micro_batch = rehearsal(self.config.memory.micro_batch_tokens, packed=self.model.packs)
        with self.optimizer.gradients.dropped(), self.model.one_layer_of_each_kind():
            old_logprobs = self.logprobs([micro_batch])[0] if self.config.algorithm.updates_per_step > 1 else None
            self._backward(micro_batch, old_logprobs)

    def micro_batches(
        self, batch: RolloutBatch, completions: Sequence[int], processed: Sequence[int], *, normalized: bool = True
    ) -> Iterator[MicroBatch]:
        """This rank's micro-batches of `processed`, one after the other, for an update over `completions`."""
        return micro_batches_of(
            batch,
            completions,
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
            budget_tokens=self.config.memory.micro_batch_tokens,
            algorithm=self.config.algorithm,
            processed=processed,
            normalized=normalized,
            packed=self.model.packs,
            shared=self.model.shares_prompts,
        )

    @torch.no_grad()
    def logprobs(self, micro_batches: Iterable[MicroBatch]) -> list[Tensor]:
        """The policy's log-probabilities of every micro-batch, in order: [T] each, on the device."""
        with without_dropout(self.model):
            return [self._forward(self.model, part.to(self.device))[0] for part in micro_batches]

    def _announce_backward(self, *, is_last: bool) -> None:
        """Tell FSDP if the next backward pass is the last one before an optimizer step. Until then it need not wait for
        the sums over the ranks, keeps embedding and head gathered, and adds nothing over the copies of the state."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_all_reduce(is_last)
            self.model.set_is_last_backward(is_last)
            self.model.set_reshard_after_backward(is_last, recurse=False)

    def _backward(self, micro_batch: MicroBatch, old_logprobs: Tensor | None) -> LossMetrics:
        """Add the gradient of the micro-batch to those of the parameters. Its graph is freed when the call returns.

        If metrics are not detached, the graph is kept, with all that it has saved for backward.
        """
        algorithm = self.config.algorithm
        micro_batch = micro_batch.to(self.device)
        # First, while nothing is kept for the backward pass.
        reference_logprobs = self._reference_logprobs(micro_batch)
        exact = self.logprobs([micro_batch])[0] if self.config.lora and self.config.lora.dropout else None
        logprobs, entropy = self._forward(self.model, micro_batch)
        if exact is not None:
            # Dropout has a part in the gradient alone: ratios and importance weights compare whole policies.
            logprobs = exact + (logprobs - logprobs.detach())
        loss, metrics = policy_loss(
            micro_batch,
            logprobs,
            entropy if algorithm.entropy_coefficient else entropy.detach(),
            algorithm,
            self.loss,
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
        )
        # FSDP averages gradients over the ranks; the weights have already divided by the whole batch.
        keeps_graph = not self.config.memory.detach_metrics
        with activity(Activity.BACKWARD), self.optimizer.gradients.added_up():
            (loss * dist.get_world_size()).backward(retain_graph=keeps_graph)
        return replace(metrics, sums=metrics.sums | {"loss": loss}) if keeps_graph else metrics

    def _optimizer_step(self, normalizer: int = 1) -> float:
        """Normalize, clip and apply the gradients. Returns the norm before clipping. Gradients that are not finite are
        dropped."""
        gradients = self.optimizer.gradients
        norm = gradients.norm() / normalizer
        if math.isfinite(norm):
            gradients.clip(norm, self.config.algorithm.max_grad_norm, normalizer)
            self.parameters_touched = True
            with activity(Activity.OPTIMIZER):
                self.optimizer.step()
        gradients.clear()
        return norm

    @torch.no_grad()
    def _reference_logprobs(self, micro_batch: MicroBatch) -> Tensor | None:
        """[T] Log-probabilities of the initial model; None without a KL term."""
        if self.reference is None:
            return None
        with without_adapters(self.reference):
            logprobs, _ = self._forward(self.reference, micro_batch)
        if isinstance(self.reference, FSDPModule):
            # Without a backward pass, FSDP keeps the parameters of the root (embedding and head) gathered.
            self.reference.reshard()
        return logprobs

    def _forward(self, model: PolicyModel, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token, both [T] float32. `micro_batch` is on the device."""
        with activity(Activity.FORWARD):
            logprobs, entropy = model(
                micro_batch.input_ids, micro_batch.hidden_rows, micro_batch.targets, **micro_batch.packing
            )
        return logprobs, entropy


def _with_last(micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    """Each micro-batch, and whether it is the last one."""
    rest = iter(micro_batches)
    following = next(rest, None)
    while (current := following) is not None:
        following = next(rest, None)
        yield current, following is None


@dataclass(slots=True)
class BegunUpdate:
    """An update whose gradients are added up."""

    metrics: UpdateMetrics
    compiled_before: int
    micro_batches: int = 0
    parts: int = 0
    """Parts of the step (`RolloutBatch.parts`) that were added."""


class UpdateMetrics:
    """Adds up the metrics of micro-batches, then those of ranks."""

    def __init__(self, *, detached: bool) -> None:
        """`detached`: reject tensors with a gradient, which keep a graph alive. Otherwise keep them, to measure their
        cost."""
        self._detached = detached
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, part: LossMetrics) -> None:
        """Add the metrics of a micro-batch. Raises `ValueError` for one with a gradient, unless that is allowed."""
        for name, value in (part.sums | part.maxima).items():
            if self._detached and value.requires_grad:
                raise ValueError(
                    f"expected the metric {name} without gradient, found one that keeps its graph alive; detach it"
                )
        for name, value in part.sums.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value
        for name, value in part.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def over_ranks(self, by: int, by_means: int, counts: Mapping[str, int]) -> dict[str, float]:
        """Sums over all ranks, and maxima. All ranks must add the same names.

        `by`: divisor of the loss. `by_means`: divisor of the other sums. `counts`: those of this rank; the maximum over
        the ranks is added.
        """
        sums, maxima = (torch.stack(list(kept.values())).detach() for kept in (self._sums, self._maxima))
        maxima = torch.cat([maxima, torch.tensor(list(counts.values()), dtype=maxima.dtype, device=maxima.device)])
        # A maximum over ranks may drop NaN, but not infinity.
        maxima = torch.where(maxima.isnan(), torch.inf, maxima)
        dist.all_reduce(sums, dist.ReduceOp.SUM)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        divisors = torch.tensor([by if name == "loss" else by_means for name in self._sums], device=sums.device)
        values = torch.cat([sums / divisors, maxima]).tolist()
        return dict(zip([*self._sums, *self._maxima, *counts], values, strict=True))


def allow_kept_graphs() -> None:
    """Recompile the layers so that their graphs can be kept after a backward pass (`detach_metrics` disabled).

    Otherwise backward reuses the memory that forward has saved, and torch refuses to keep the graph.
    """
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()


PROFILE_STEP = "RLJOB_PROFILE_STEP"
_ROWS = 60
"""Operators that are listed in a profile."""


@contextmanager
def profiled(step: int, rank: int, output_dir: Path) -> Iterator[None]:
    """Profile the block if it is the update of the step that `RLJOB_PROFILE_STEP` names, for developers.

    Writes a Chrome trace and a table of the operations, by their own time on the device, to `profile/` of the output
    directory. Profiling itself slows the step down.
    """
    if os.environ.get(PROFILE_STEP) != str(step):
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as taken:
        yield
        if on_gpu:
            torch.cuda.synchronize()
    directory = output_dir / "profile"
    directory.mkdir(parents=True, exist_ok=True)
    name = f"update-step-{step}-policy-{rank}"
    taken.export_chrome_trace(str(directory / f"{name}.json.gz"))
    by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    (directory / f"{name}.txt").write_text(taken.key_averages().table(sort_by=by, row_limit=_ROWS), encoding="utf-8")
