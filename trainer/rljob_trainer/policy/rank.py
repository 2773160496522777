"""One rank of the policy: a process with a shard of the trained model and of its optimizer."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_api.memory_plan import MemoryPlan
from rljob_client.errors import RunError
from rljob_memory.sample import MemorySample
from rljob_trainer.algorithms.functions import loss_function
from rljob_trainer.algorithms.learning_rate import learning_rate_at
from rljob_trainer.ledger.checkpoint_manifest import FileDigest
from rljob_trainer.policy import checkpoint, export
from rljob_trainer.policy.caching_allocator import ExpandableSegments, cache_released_after
from rljob_trainer.policy.config import PolicyConfig, UpdateResult
from rljob_trainer.policy.interrupted_pass import forget_interrupted_pass, leave_group, use_group
from rljob_trainer.policy.loading import LoadedPolicy, distinct_models, reference_model, trained_model
from rljob_trainer.policy.lora import export_adapter
from rljob_trainer.policy.membership import Membership
from rljob_trainer.policy.model import (
    PolicyModel,
    checkpoint_activations,
    sent_name,
)
from rljob_trainer.policy.optimizer import MasterAdamW
from rljob_trainer.policy.policy_offload import PolicyOffload
from rljob_trainer.policy.state_snapshot import StateSnapshot
from rljob_trainer.policy.update import PolicyUpdate, allow_kept_graphs, profiled
from rljob_trainer.policy.weight_loading import read_frozen_weights
from rljob_trainer.rollout_batch import RolloutBatch
from rljob_trainer.telemetry.memory import MemoryLog
from rljob_trainer.telemetry.out_of_memory import attach_out_of_memory_observer


class PolicyRank:
    """Rank `rank` of `world_size`. Call `rendezvous` (on rank 0), `connect` and `load`, then the rest in any order.

    Every method after `rendezvous` is collective: all ranks call it with the same arguments.
    """

    def __init__(self, rank: int, world_size: int, config: PolicyConfig) -> None:
        self.rank, self.world_size, self.config = rank, world_size, config
        self._device = torch.device(config.device)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._on_gpu = config.device == "cuda"
        self._segments = ExpandableSegments()
        self._membership = Membership(rank, world_size, config.device)
        self._memory_log = MemoryLog(config.output_dir / "memory" / f"policy-{rank}.jsonl", config.device)
        self._step = 0

    def rendezvous(self) -> tuple[str, int]:
        """Host and port for `connect` and `rejoin`. Called on rank 0 before the others connect."""
        return self._membership.rendezvous()

    def connect(self, master_address: str, master_port: int) -> None:
        """Join the process group. Returns when all ranks have joined."""
        self._memory_log.begin_phase(self._step, "load")
        if self.config.device == "cuda":
            attach_out_of_memory_observer(
                self.config.output_dir / "oom", "policy", self.rank, lambda: self._memory_log.progress
            )
        if self.config.device == "cpu":
            _make_deterministic()
        self._membership.join(master_address, master_port)

    def load(self) -> None:
        """Shard and read the model, and create its optimizer. Raises `BadInput` if the model cannot be used,
        and `OutputUnavailable` if this rank cannot write to the output directory."""
        export.rehearse_output(self.config, self.rank)
        loss = loss_function(self.config.algorithm, self.config.task_directory)
        learning_rate_at(self.config.algorithm, self.config.algorithm.steps)  # refuses wrong arguments of a schedule
        model, remainders = trained_model(self.config, self.world_size)
        if self.config.memory.activation_checkpointing:
            checkpoint_activations(model, enabled=True)
        if not self.config.memory.detach_metrics:
            allow_kept_graphs()
        reference = reference_model(self.config, self.world_size, model)
        if self._on_gpu:
            self._arrange_gpu_memory(model)
        self._checkpoint_writer = checkpoint.CheckpointWriter(copies=self.config.checkpoint_copy)
        optimizer = MasterAdamW(model, self.config, remainders)
        optimizer.before_step = self._before_optimizer_step
        self._loaded = LoadedPolicy(
            model,
            reference,
            optimizer,
            StateSnapshot(optimizer) if self.config.snapshots and not optimizer.state.offloaded else None,
            PolicyUpdate(self.config, model, optimizer, loss, reference, self._device, self._log_micro_batch),
            self._offload_of(distinct_models(model, reference)),
        )
        optimizer.weights_on_host = self._loaded.offload.copies
        self._membership.before_leaving = self._drop_groups
        if self.config.compile_ahead:
            with self._membership.collective(), self._cache_released_after():
                self._loaded.update.rehearse()
        self._memory_log.record(self._step, "load")

    def update(self, batch: RolloutBatch, added: int = 0, ends: bool = True) -> UpdateResult:
        """Process this rank's share of the scored rollouts of one step, and change the weights.

        `ends` False: `batch` has the groups of one part of the step, whose gradient is added. Nothing changes yet, and
        there are no metrics. `added`: number of parts that earlier calls have added for this step.
        """
        begun = time.perf_counter()
        if not added:
            self._begin_update(batch.step)
        profiling = profiled(batch.step, self.rank, self.config.output_dir)
        with self._membership.collective(), self._cache_released_after(), self._clean_afterwards(ends), profiling:
            policy = self._loaded.with_weights()
            if not added and policy.snapshot is not None:
                policy.snapshot.begin()
            if not ends:
                policy.update.add(batch)
                return UpdateResult({}, MemorySample(), time.perf_counter() - begun)
            metrics = policy.update.run(batch, added)
        memory = self._memory_log.record(batch.step, "update")
        return UpdateResult(metrics, memory, time.perf_counter() - begun)

    def drop_update(self) -> None:
        """Drop the parts that were added to the gradient. Not collective."""
        if self._on_gpu:
            torch.cuda.synchronize()
        for model in self._loaded.models():
            forget_interrupted_pass(model)
        self._loaded.update.forget()

    def _begin_update(self, step: int) -> None:
        self._step = step
        # If the model draws random numbers, they follow from the step's number, so that a replay repeats them.
        torch.manual_seed(self.config.algorithm.seed + step)
        self._memory_log.begin_phase(step, "update")
        self._loaded.update.forget()
        self._loaded.update.parameters_touched = False

    # --- weights, which may be in host memory: these bring them back, `_loaded` does not ---

    @property
    def _model(self) -> PolicyModel:
        return self._loaded.with_weights().model

    @property
    def _optimizer(self) -> MasterAdamW:
        return self._loaded.with_weights().optimizer

    def offload_weights(self, phase: str) -> None:
        """Move the weights to host memory until they are needed (`policy_offload`). Not collective.

        `phase`: the one that ends with this, for the memory log.
        """
        if self._checkpoint_writer.in_place:
            self._checkpoint_writer.wait_until_written()  # perhaps from weights that were on the device
        with cache_released_after(enabled=self._on_gpu):
            self._loaded.offload.offload()
        self._memory_log.record(self._step, phase)

    def named_full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and full parameters in the engine's dtype and in the shapes of `export.full_parameters`."""
        return export.full_parameters(self._model, self._dtype)

    @contextmanager
    def weights_for_sync(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """`named_full_parameters`, in the same shapes, while the memory of the phase `sync` is recorded."""
        self._memory_log.begin_phase(self._step, "sync")
        with self._membership.collective(), self._cache_released_after():
            yield self.named_full_parameters()
        self._memory_log.record(self._step, "sync")

    def export_pretrained(self, directory: Path) -> None:
        """Write the model in Hugging Face format, with the tokenizer of the initial model; or its adapters alone."""
        lora = self.config.lora
        self._checkpoint_writer.release()  # rank 0 takes as much for the whole model, or less
        with self._membership.collective(), self._cache_released_after():
            if lora is not None and lora.export == "Adapter":
                export_adapter(self._model.causal_lm, lora, self.config.base_model, directory)
                return
            export.export_pretrained(self._model, self._dtype, self.config.model_dir, directory)

    # --- the memory plan ---

    def change_memory(self, memory: MemoryPlan, checkpoint_copy: bool | None = None) -> None:
        """Apply other memory settings. They affect neither the weights nor the result of an update.

        `checkpoint_copy`: as in `PolicyConfig`, under these settings; None: as before.
        """
        offload, checkpointing = memory.optimizer_offload, memory.activation_checkpointing
        if not memory.detach_metrics and self.config.memory.detach_metrics:
            allow_kept_graphs()
        if offload != self.config.memory.optimizer_offload:
            self._checkpoint_writer.wait_until_written()
            self._checkpoint_writer.release()
            self._loaded.optimizer.state.offload(offload)
        if checkpoint_copy is not None:
            self._checkpoint_writer.allow_copies(checkpoint_copy)
        model = self._loaded.model
        if checkpointing != self.config.memory.activation_checkpointing:
            checkpoint_activations(model, enabled=checkpointing)
        model.chunk_tokens = memory.logprob_chunk_tokens
        self.config = self._loaded.update.config = replace(self.config, memory=memory)
        if self._on_gpu:
            with self._cache_released_after():  # a new engine may start next
                self._arrange_gpu_memory(model)

    # --- after a failure ---

    def can_undo_update(self) -> bool:
        """True if the latest update, complete or not, can be repeated with the same result. Not collective.

        It has not begun to change parameters, or `rejoin` can restore them.
        """
        snapshot = self._loaded.snapshot
        return not self._loaded.update.parameters_touched or (snapshot is not None and snapshot.taken)

    def rejoin(self, master_address: str, master_port: int, undo_update: bool) -> None:
        """Join a new process group after a failure of any rank, in the state before the failed work.

        `undo_update`: the failed work is the latest update, which this rank may have completed. Raises `RunError` with
        several copies of the state, whose groups are not formed anew.
        """
        if self.config.memory.policy_copies > 1:
            raise RunError("expected one copy of the policy's state, found several, whose ranks do not join again")
        self._membership.leave()
        gc.collect()
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self._membership.join(master_address, master_port)
        # The groups in the same order as in `load`, since they are found by name.
        self._checkpoint_writer.renew_group()
        for model in self._loaded.models():
            forget_interrupted_pass(model)
            use_group(model, dist.distributed_c10d._get_default_group())
        self._loaded.update.forget()
        if undo_update and self._loaded.update.parameters_touched:
            policy = self._loaded.with_weights()
            assert policy.snapshot is not None, "the caller has asked can_undo_update"
            policy.snapshot.restore()
            policy.update.parameters_touched = False

    def _drop_groups(self) -> None:
        """Called before this rank leaves the process group."""
        self._checkpoint_writer.leave_group()
        for model in self._loaded.models():
            leave_group(model)

    # --- checkpoints ---

    def start_checkpoint(self, directory: Path) -> None:
        """Start writing policy and optimizer into `directory`. If they were copied, updates may continue while the
        files are written."""
        self._memory_log.begin_phase(self._step, "checkpoint")
        with self._membership.collective(), self._cache_released_after():
            # Weights in host memory are read there: the engine on the same GPU may be awake.
            self._checkpoint_writer.start(self._loaded.optimizer, directory)
        self._memory_log.record(self._step, "checkpoint")

    def checkpoint_written(self) -> bool:
        """True if `finish_checkpoint` would return at once."""
        return self._checkpoint_writer.written()

    def finish_checkpoint(self) -> dict[str, FileDigest]:
        """Wait until the checkpoint in progress is durable. Returns the digests of this rank's files by name."""
        return self._checkpoint_writer.finish()

    def load_checkpoint(self, directory: Path) -> str | None:
        """Load policy and optimizer from a checkpoint, bit for bit.

        Returns None, or a description of damage in the files; the caller must then load another checkpoint.
        """
        with self._cache_released_after():
            return checkpoint.load_checkpoint(self._optimizer, directory, self.rank, self.world_size)

    # --- internals ---

    def _before_optimizer_step(self) -> None:
        if self._loaded.snapshot is not None:
            self._loaded.snapshot.complete()
        if self._checkpoint_writer.in_place:
            self._checkpoint_writer.wait_until_written()

    def _cache_released_after(self) -> AbstractContextManager[None]:
        """Release the allocator's cache after a phase, if another process uses the GPU next."""
        return cache_released_after(enabled=self._on_gpu and self.config.memory.empty_cache)

    @contextmanager
    def _clean_afterwards(self, ends: bool) -> Iterator[None]:
        """Drop gradients at the end of an update or after a failure. A single rank can then run the next update, or
        retry a failed one; several ranks first `rejoin`."""
        try:
            yield
        except BaseException:
            if self.world_size == 1:
                for model in self._loaded.models():
                    forget_interrupted_pass(model)
            self._loaded.update.forget()
            raise
        if ends:
            self._loaded.update.forget()

    def _log_micro_batch(self, number: int) -> None:
        self._memory_log.record(self._step, "update", number)

    def _arrange_gpu_memory(self, model: PolicyModel) -> None:
        """Apply the settings of the allocator, once `model` is loaded."""
        wanted = self.config.memory.expandable_segments
        if wanted != self._segments.enabled:
            (self._segments.enable if wanted else self._segments.disable)()

    def _offload_of(self, models: list[PolicyModel]) -> PolicyOffload:
        read = partial(read_frozen_weights, models, self.config.model_dir, self.config.device, sent_name)
        return PolicyOffload(models, self._device, None if self.config.copy_frozen_weights else read)


def _make_deterministic() -> None:
    """Make results bit-reproducible, so that a resumed run equals an uninterrupted one."""
    # Like torch.use_deterministic_algorithms(True), which would also import the compiler.
    torch.set_deterministic_debug_mode("error")
    # The memory is overwritten anyway: filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
