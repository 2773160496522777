"""The classes of causes: the meaning of each, and the settings to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FailureClass(StrEnum):
    """The cause of an out-of-memory failure."""

    FRAGMENTATION = "Fragmentation"
    ALLOCATOR_CACHE = "AllocatorCache"
    RETAINED_GRAPH = "RetainedGraph"
    ACTIVATION_SPIKE = "ActivationSpike"
    KV_CACHE_OVERSIZED = "KVCacheOversized"
    WEIGHT_SYNC_SPIKE = "WeightSyncSpike"
    MODEL_WEIGHTS = "ModelWeights"
    OPTIMIZER_STATE = "OptimizerState"
    ENGINE_NOT_ASLEEP = "EngineNotAsleep"
    FOREIGN_PROCESS = "ForeignProcess"
    CONTROLLER_CONTEXT = "ControllerContext"
    GPU_MEMORY_LIMIT = "GpuMemoryLimit"
    HOST_MEMORY = "HostMemory"
    SHARED_MEMORY = "SharedMemory"
    UNKNOWN = "Unknown"

    @property
    def meaning(self) -> str:
        """The class in one clause."""
        return _TEXTS[self].meaning

    @property
    def advice(self) -> str:
        """The settings to change: fields of an RLJob, then those of other trainers."""
        text = _TEXTS[self]
        parts = (text.own, text.smaller_job, f"Other trainers: {text.others}" if text.others else "")
        return " ".join(filter(None, parts))

    @property
    def general_advice(self) -> str:
        """The same without fields of an RLJob, for the log of another program."""
        text = _TEXTS[self]
        general = text.general or text.others or text.own
        return general[:1].upper() + general[1:]

    @property
    def own_advice(self) -> str:
        """The fields of an RLJob that can change while the job exists."""
        return _TEXTS[self].own


@dataclass(frozen=True, slots=True)
class _Text:
    meaning: str
    own: str
    """Fields of an RLJob that can change while the job exists."""
    others: str = ""
    """Settings of other trainers."""
    smaller_job: str = ""
    """Fields of an RLJob that only another job can have, and that help."""
    general: str = ""
    """For the log of another program, if `others` is absent or lacks the best option."""


_DETACH = (
    "Detach values that are kept after a micro-batch: call .detach() or .item() on losses, log-probabilities and "
    "metrics before they go into a list. A smaller micro-batch does not help"
)
_END_THE_OTHER = "End the other process, or run on a GPU that no other process uses; nvidia-smi lists the processes."
_LOOK = (
    "Look at the numbers. Keep the log from its first error on, and an allocator snapshot "
    "(torch.cuda.memory._dump_snapshot). Try"
)

_TEXTS = {
    FailureClass.FRAGMENTATION: _Text(
        "torch holds enough free memory for the request, but in pieces that are all too small",
        "Set memory.expandableSegments: Enabled.",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for the training process alone, not for the vLLM engine.",
    ),
    FailureClass.ALLOCATOR_CACHE: _Text(
        "torch's cache in one process holds memory that another process on the GPU needs",
        "Set memory.emptyCache: Enabled.",
        "call torch.cuda.empty_cache() on every rank after the update, before the engine wakes or NCCL starts, when "
        "the references are dropped.",
    ),
    FailureClass.RETAINED_GRAPH: _Text(
        "memory in tensors grows every micro-batch or step: autograd graphs are kept alive",
        f"{_DETACH}; memory.activationCheckpointing: Enabled only delays the failure.",
        general=f"{_DETACH}.",
    ),
    FailureClass.ACTIVATION_SPIKE: _Text(
        "a forward or backward pass, or the logits in it, needs more memory than is left",
        "Lower memory.microBatchTokens, and memory.logprobChunkTokens if logits are the large part, or set "
        "memory.activationCheckpointing: Enabled.",
        "use a smaller micro-batch, shorter sequences, chunked or fused log-probabilities, gradient checkpointing.",
        "Another job with policy.lora, or with smaller policy.optimizer.moments, leaves more room for activations.",
    ),
    FailureClass.KV_CACHE_OVERSIZED: _Text(
        "the engine's share of the GPU, its KV cache above all, is too large or too small",
        "Set memory.kvCache to fewer bytes if the engine takes too much, to more if it has too few blocks.",
        "change kv_cache_memory_bytes or gpu_memory_utilization, max_model_len, max_num_seqs.",
    ),
    FailureClass.WEIGHT_SYNC_SPIKE: _Text(
        "full copies of the weights for the engine do not fit next to the memory in use",
        "Lower memory.syncBucketSize.",
        "gather and send the weights in buckets, drop the copies and empty the cache before the engine wakes, and wake "
        "its weights and its KV cache one after the other.",
    ),
    FailureClass.MODEL_WEIGHTS: _Text(
        "the model's weights do not fit on the GPU, before any work is done",
        "Use more GPUs for the policy (policy.gpusPerReplica), a larger GPU, or a smaller model.",
        "load in bfloat16, shard the weights (FSDP, ZeRO 3, tensor parallelism), quantize or offload them.",
        "Another job with policy.lora keeps half as much for the policy's weights.",
    ),
    FailureClass.OPTIMIZER_STATE: _Text(
        "the optimizer's state, or its temporary copies during a step, do not fit",
        "Set memory.optimizerOffload: Enabled, or use more policy GPUs.",
        "offload or shard the optimizer's state, allocate it before the KV cache is sized, set foreach=False.",
        "Another job with policy.optimizer.moments: bfloat16 keeps a smaller state, one with policy.lora hardly any.",
    ),
    FailureClass.ENGINE_NOT_ASLEEP: _Text(
        "the engine holds GPU memory while the policy needs it",
        "Set memory.rolloutSleep: Level2.",
        "use enable_sleep_mode and sleep(level=2) before the update, and no expandable_segments in the engine's "
        "environment if its log shows that sleeping freed nothing.",
    ),
    FailureClass.FOREIGN_PROCESS: _Text(
        "a process that is not part of the job holds GPU memory",
        f"{_END_THE_OTHER} No setting in spec.memory frees its memory; a smaller memory.kvCache leaves it room.",
        general=_END_THE_OTHER,
    ),
    FailureClass.CONTROLLER_CONTEXT: _Text(
        "processes that do not work on this GPU each hold a CUDA context on it",
        'Start processes that need no GPU with CUDA_VISIBLE_DEVICES="", call torch.cuda.set_device(local_rank) first '
        "in every rank, load tensors with map_location, and name device_ids to barrier().",
    ),
    FailureClass.GPU_MEMORY_LIMIT: _Text(
        "the process reached a limit on its GPU memory, while the GPU had memory left",
        "Raise or remove the limit: torch.cuda.set_per_process_memory_fraction, per_process_memory_fraction in "
        "PYTORCH_CUDA_ALLOC_CONF, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, or the share that the pod requests of the GPU.",
    ),
    FailureClass.HOST_MEMORY: _Text(
        "host memory ran out, on the machine or in the container",
        "Raise the memory limit of the pod, and recovery.maxHostMemory. Otherwise memory.optimizerOffload: Disabled "
        "and memory.rolloutSleep: Level2 keep less in host memory.",
        "use fewer data workers, less offloading and pinning.",
        general="Raise the limit of host memory: --mem of a Slurm job, resources.limits.memory of a pod, --memory of "
        "docker run. Otherwise use fewer data workers, and less offloading and pinning.",
    ),
    FailureClass.SHARED_MEMORY: _Text(
        "/dev/shm is full",
        "Enlarge /dev/shm: an emptyDir with medium: Memory and a sizeLimit, or docker run --shm-size. Remove files "
        "that dead processes left there. Fewer data workers or a smaller Ray object store need less.",
    ),
    FailureClass.UNKNOWN: _Text(
        "memory ran out, and the evidence does not show why",
        f"{_LOOK} a smaller memory.microBatchTokens first, then a smaller memory.kvCache.",
        general=f"{_LOOK} smaller micro-batches first, then a smaller KV cache.",
    ),
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One cause that fits the evidence."""

    failure_class: FailureClass

    confidence: float
    """Between 0 and 1; above 0.8 only if numbers or an unmistakable message show the cause."""

    message: str
    """Message about the cause, with its numbers."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    """Bytes and counts behind it, by name."""

    program_advice: str = ""
    """Options of the program that wrote the log; empty if it is not known, or has none that helps."""

    is_of_rljob: bool = True
    """False if no file is known to be of an RLJob: then its fields are no advice."""

    @property
    def advice(self) -> str:
        """The settings to change: those of the program that wrote the log, else of an RLJob, or of any trainer."""
        general = self.failure_class.advice if self.is_of_rljob else self.failure_class.general_advice
        return self.program_advice or general

    def as_dict(self) -> dict[str, Any]:
        """`class`, `confidence`, `message`, `numbers`, `advice`, as JSON values."""
        return {
            "class": str(self.failure_class),
            "confidence": self.confidence,
            "message": self.message,
            "numbers": dict(self.numbers),
            "advice": self.advice,
        }
