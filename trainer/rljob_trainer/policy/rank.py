"""One rank of the policy: a process with a shard of the trained model and of its optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rljob_api.memory_plan import MemoryPlan
from rljob_trainer.policy import checkpoint, export
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.interrupted_pass import forget_interrupted_pass
from rljob_trainer.policy.memory_mitigations.cached_memory import cache_released_after
from rljob_trainer.policy.memory_mitigations.expandable_segments import ExpandableSegments
from rljob_trainer.policy.memory_mitigations.weight_export import WeightExport
from rljob_trainer.policy.model import PolicyModel, checkpoint_activations, fuse_kernels, read_policy_model, shard
from rljob_trainer.policy.optimizer import adamw, move_optimizer_state, optimizer_on_device
from rljob_trainer.policy.process_group import Rendezvous, init_process_group
from rljob_trainer.policy.result import ModelInfo, UpdateResult
from rljob_trainer.policy.update import PolicyUpdate
from rljob_trainer.policy.update_metrics import allow_kept_graphs
from rljob_trainer.rollout_batch import FloatArray, RolloutBatch
from rljob_trainer.telemetry.memory import MemoryLog
from rljob_trainer.telemetry.out_of_memory import attach_out_of_memory_observer
from rljob_trainer.weight_sync.ipc import ReservedBuffer


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
        self._rendezvous = Rendezvous(world_size)
        self._memory_log = MemoryLog(config.output_dir / "memory" / f"policy-{rank}.jsonl", config.device)
        self._step = 0

    def rendezvous(self) -> tuple[str, int]:
        """Host and port for `connect`. Called on rank 0 before the others connect."""
        return self._rendezvous.serve()

    def connect(self, master_address: str, master_port: int) -> None:
        """Join the process group. Returns when all ranks have joined."""
        self._memory_log.begin_phase(self._step, "load")
        if self.config.device == "cuda":
            attach_out_of_memory_observer(
                self.config.output_dir / "oom", "policy", self.rank, lambda: self._memory_log.progress
            )
        if self.config.device == "cpu":
            _make_deterministic()
        init_process_group(
            self._rendezvous.join(master_address, master_port), self.rank, self.world_size, self.config.device
        )

    def load(self) -> ModelInfo:
        """Read and shard the model, and create its optimizer. Raises `BadInput` if the model cannot be used."""
        self._model = self._sharded_model()
        if self.config.memory.activation_checkpointing:
            checkpoint_activations(self._model, enabled=True)
        if not self.config.memory.detach_metrics:
            allow_kept_graphs()
        reference = self._sharded_model().requires_grad_(False) if self.config.loss.kl_coefficient > 0 else None
        self._weight_export = WeightExport(self._segments, self._largest_parameter_bytes())
        if self._on_gpu:
            self._arrange_gpu_memory()
        self._optimizer = adamw(self._model, self.config)
        self._update = PolicyUpdate(
            self.config, self._model, self._optimizer, reference, self._device, self._log_micro_batch
        )
        self._checkpoint_writer = checkpoint.CheckpointWriter()
        self._memory_log.record(self._step, "load")
        return self._model_info()

    def update(self, batch: RolloutBatch) -> UpdateResult:
        """Learn from the scored rollouts of one step, of which this rank processes its share."""
        begun = time.perf_counter()
        self._step = batch.step
        # If the model draws random numbers, they follow from the step's number, so that a replay repeats them.
        torch.manual_seed(self.config.seed + batch.step)
        self._memory_log.begin_phase(batch.step, "update")
        self._update.parameters_touched = False
        with self._cache_released_after(), self._clean_afterwards():
            metrics = self._update.run(batch)
        memory = self._memory_log.record(batch.step, "update")
        return UpdateResult(metrics, memory, time.perf_counter() - begun)

    def token_logprobs(self, batch: RolloutBatch) -> list[FloatArray]:
        """The policy's log-probabilities of all response tokens, parallel to `batch.response_ids`."""
        updates = self._update.micro_batches(batch)
        micro_batches = chain.from_iterable(updates)
        with self._cache_released_after():
            mine = {
                completion: part
                for micro_batch, logprobs in zip(micro_batches, self._update.logprobs(updates), strict=True)
                for completion, part in micro_batch.by_completion(logprobs.cpu().numpy())
            }
        shares: list[dict[int, FloatArray]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(shares, mine)
        found = {completion: values for share in shares for completion, values in share.items()}
        return [found.get(completion, np.zeros(0, np.float32)) for completion in range(len(batch))]

    # --- weights ---

    def named_full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Each full parameter in the engine's dtype, by its Hugging Face name; see `export.full_parameters`."""
        return export.full_parameters(self._model, self._dtype)

    @contextmanager
    def weights_for_export(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """`named_full_parameters`, in memory that another process can open (CUDA IPC)."""
        self._memory_log.begin_phase(self._step, "sync")
        exporting = self._weight_export.exporting() if self._on_gpu else nullcontext()
        with self._cache_released_after(), exporting:
            yield self.named_full_parameters()
        self._memory_log.record(self._step, "sync")

    @property
    def export_buffer(self) -> ReservedBuffer | None:
        """The buffer for exported weights; None: a new one for each bucket."""
        return self._weight_export.buffer

    def weights_digest(self) -> str:
        """SHA-256 of all parameters, in float32; the same on every rank."""
        return export.weights_digest(self._model)

    def export_pretrained(self, directory: Path) -> None:
        """Write the model in Hugging Face format, with the tokenizer of the initial model."""
        with self._cache_released_after():
            export.export_pretrained(self._model, self._dtype, self.config.model_dir, directory)

    # --- the memory plan ---

    def change_memory(self, memory: MemoryPlan) -> None:
        """Apply other memory settings. They affect neither the weights nor the result of an update."""
        offload, checkpointing = memory.optimizer_offload, memory.activation_checkpointing
        if not memory.detach_metrics and self.config.memory.detach_metrics:
            allow_kept_graphs()
        if offload != self.config.memory.optimizer_offload:
            move_optimizer_state(self._optimizer, torch.device("cpu") if offload else self._device)
        if checkpointing != self.config.memory.activation_checkpointing:
            checkpoint_activations(self._model, enabled=checkpointing)
        self._model.chunk_tokens = memory.logprob_chunk_tokens
        self.config = self._update.config = replace(self.config, memory=memory)
        if self._on_gpu:
            with self._cache_released_after():  # a new engine may start next
                self._arrange_gpu_memory()

    def parameters_touched(self) -> bool:
        """True if the latest update, complete or not, has started to change parameters.

        If False, a single rank can retry a failed update with the same result as a first run.
        """
        return self._update.parameters_touched

    # --- checkpoints ---

    def start_checkpoint(self, directory: Path) -> None:
        """Copy policy and optimizer, and start writing the copy into `directory`. Updates may continue meanwhile."""
        self._memory_log.begin_phase(self._step, "checkpoint")
        with self._cache_released_after():
            self._checkpoint_writer.start(self._model, self._optimizer, directory)
        self._memory_log.record(self._step, "checkpoint")

    def checkpoint_written(self) -> bool:
        """True if `finish_checkpoint` would return at once."""
        return self._checkpoint_writer.written()

    def finish_checkpoint(self) -> None:
        """Return when the checkpoint in progress is durable."""
        self._checkpoint_writer.finish()

    def load_checkpoint(self, directory: Path) -> None:
        """Load policy and optimizer from a checkpoint, bit for bit."""
        offload = self.config.memory.optimizer_offload
        with self._cache_released_after(), optimizer_on_device(self._optimizer, self._device, offload=offload):
            checkpoint.load_checkpoint(self._model, self._optimizer, directory)

    # --- how ---

    def _sharded_model(self) -> PolicyModel:
        model = read_policy_model(
            self.config.model_dir,
            temperature=self.config.temperature,
            chunk_tokens=self.config.memory.logprob_chunk_tokens,
        )
        if self.config.device == "cuda":
            fuse_kernels(model)
        shard(model, init_device_mesh(self.config.device, (self.world_size,)), self._dtype)
        return model

    def _cache_released_after(self) -> AbstractContextManager[None]:
        """For phases after which another process uses the GPU."""
        return cache_released_after(enabled=self._on_gpu and self.config.memory.empty_cache)

    @contextmanager
    def _clean_afterwards(self) -> Iterator[None]:
        """Drop gradients afterwards. A single rank can then run the next update, or retry a failed one."""
        try:
            yield
        except BaseException:
            if self.world_size == 1:
                forget_interrupted_pass(self._model)
            raise
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def _log_micro_batch(self, number: int) -> None:
        self._memory_log.record(self._step, "update", number)

    def _arrange_gpu_memory(self) -> None:
        # First, since a reserved export buffer must be in classic memory, as the weights are.
        self._weight_export.arrange(self.config.memory)
        wanted = self.config.memory.expandable_segments
        if wanted != self._segments.enabled:
            (self._segments.enable if wanted else self._segments.disable)()

    def _largest_parameter_bytes(self) -> int:
        return max(parameter.numel() for parameter in self._model.parameters()) * self._dtype.itemsize

    def _model_info(self) -> ModelInfo:
        causal_lm = self._model.causal_lm
        return ModelInfo(
            architecture=type(causal_lm).__name__,
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            layers=len(self._model.decoder_layers),
            vocabulary=causal_lm.get_output_embeddings().weight.shape[0],
            tied_embeddings=causal_lm.get_output_embeddings().weight is causal_lm.get_input_embeddings().weight,
        )


def _make_deterministic() -> None:
    """Make results bit-reproducible, so that a resumed run equals an uninterrupted one."""
    # Like torch.use_deterministic_algorithms(True), which would also import the compiler.
    torch.set_deterministic_debug_mode("error")
    # The memory is overwritten anyway: filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
