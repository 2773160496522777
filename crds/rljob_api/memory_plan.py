"""The memory plan, and the settings of `spec.memory`: `Auto` leaves a setting to the plan, any other value pins it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rljob_api.api_model import ATOMIC, ApiModel, PositiveCount, Text, Toggle
from rljob_api.quantity import AutoOrBytes, AutoOrCount

ToggleOrPercent = Annotated[
    str, Text(r"^(Auto|Enabled|Disabled|[1-9][0-9]?%)$", "Auto, Enabled, Disabled, or a percentage such as 50%", 8)
]
"""A switch that can be on for a part."""

RolloutSleep = Literal["Disabled", "Level1", "Level2"]
"""Sleep mode of a vLLM engine while the policy uses the GPU."""


class MemorySettings(ApiModel):
    """Settings that affect memory. With `Auto`, the memory plan chooses the value and may change it after an
    out-of-memory failure. Any other value pins the setting: RLJob never changes it."""

    mode: Literal["Auto", "Disabled"] = "Auto"
    """Auto: RLJob changes the memory plan after an out-of-memory failure and resumes the job. Disabled: RLJob never
    changes the first plan."""

    admission: Literal["Warn", "Enforce"] = "Warn"
    """Effect of a prediction that the job does not fit the memory of the cluster's nodes. Warn: the condition Fits is
    False, and the job starts. Enforce: no pods are created until the job fits, or has committed a step. rljob run
    ignores it."""

    empty_cache: Toggle = "Auto"
    """If enabled, the policy releases its cached GPU memory after an update, before the engine wakes up."""

    expandable_segments: Toggle = "Auto"
    """If enabled, the policy's CUDA allocator uses expandable segments, which reduces fragmentation."""

    rollout_sleep: Literal["Auto", RolloutSleep] = "Auto"
    """vLLM's sleep mode during the update. Disabled: the engine stays awake. Level1: the engine keeps its weights in
    host memory. Level2: the engine discards them."""

    kv_cache: AutoOrBytes = "Auto"
    """Size of the KV cache of one engine on each of its GPUs, or in host memory on the CPU."""

    micro_batch_tokens: AutoOrCount = "Auto"
    """Maximum tokens per micro-batch of the policy, including padding."""

    logprob_chunk_tokens: AutoOrCount = "Auto"
    """Maximum tokens for which the policy computes logits over the whole vocabulary at a time."""

    activation_checkpointing: Toggle = "Auto"
    """If enabled, the policy recomputes activations in the backward pass instead of storing them."""

    optimizer_offload: ToggleOrPercent = "Auto"
    """Part of the optimizer state that stays in host memory and streams through the GPU during an optimizer step: a
    percentage such as 50%, all of it (Enabled), or nothing (Disabled). With Enabled, a reference model stays in host
    memory as well."""

    policy_offload: Toggle = "Auto"
    """If enabled, the weights of the policy, and of a reference model, stay in host memory while the engine on the same
    GPU generates. It has no effect with topology Disaggregated."""

    sync_bucket_size: AutoOrBytes = "Auto"
    """Maximum size of the weights that the policy sends to the engine at a time. A larger parameter is sent alone."""

    detach_metrics: Toggle = "Auto"
    """If enabled, the metrics that the policy keeps of a micro-batch are detached from the autograd graph. Disable it
    only to measure its effect."""

    weight_export: Literal["Auto", "ReservedBuffer", "SwitchSegments"] = "Auto"
    """Buffers for the weights that several policy ranks share with the engines on their GPUs through CUDA IPC.
    ReservedBuffer: keep them for the whole job. SwitchSegments: allocate them in each sync, with expandable segments
    switched off."""


def _as_share(given: object) -> object:
    """Plans of earlier versions have a boolean."""
    return float(given) if isinstance(given, bool) else given


class MemoryPlan(ApiModel):
    """A value for every memory setting. Sizes are bytes per GPU, or per process on the CPU."""

    generation: PositiveCount = 1
    """Number of the plan. The first plan has generation 1; every change increments it."""

    empty_cache: bool
    """The policy releases its cached GPU memory after an update, before the engine wakes up."""

    expandable_segments: bool
    """The policy's CUDA allocator uses expandable segments."""

    rollout_sleep: RolloutSleep
    """vLLM's sleep mode during the update. Disabled: the engine stays awake."""

    kv_cache_bytes: PositiveCount = Field(alias="kvCache")
    """Size of the KV cache of one engine on each of its GPUs, in bytes."""

    micro_batch_tokens: PositiveCount
    """Maximum tokens per micro-batch of the policy, including padding."""

    logprob_chunk_tokens: PositiveCount
    """Maximum tokens for which the policy computes logits over the whole vocabulary at a time."""

    activation_checkpointing: bool
    """The policy recomputes activations in the backward pass instead of storing them."""

    optimizer_offload: Annotated[float, Field(ge=0, le=1), BeforeValidator(_as_share)]
    """Part of the optimizer state that stays in host memory and streams through the GPU during an optimizer step, from
    0 to 1."""

    policy_offload: bool = False
    """The weights of the policy, and of a reference model, stay in host memory while the engine on the same GPU
    generates."""

    sync_bucket_bytes: PositiveCount = Field(alias="syncBucketSize")
    """Maximum size of the weights that the policy sends to the engine at a time, in bytes."""

    detach_metrics: bool = True
    """The metrics of a micro-batch are detached from the autograd graph, and the batch is freed after its last use."""

    weight_export: Literal["ReservedBuffer", "SwitchSegments"] = "SwitchSegments"
    """Buffers for the weights that several policy ranks share with the engines through CUDA IPC. ReservedBuffer: kept
    for the whole job. SwitchSegments: allocated in each sync, with expandable segments switched off."""

    policy_gpus: int | None = Field(default=None, ge=1, le=1024)
    """GPUs of the policy in all pods, one for each rank; without GPUs, its ranks. Absent: the number in spec.policy. It
    is larger than that number if the policy has grown (recovery.maxGpus)."""

    policy_copies: PositiveCount = 1
    """Copies of the policy's weights and optimizer state: 1, or the number of its pods. Then each pod shards a copy
    over its GPUs, and the pods exchange nothing but the sum of gradients, once in an update."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=16)
    """GPUs per engine; without GPUs, its processes. If rollout.tensorParallelSize is not Auto, it is that number."""

    host_memory_bytes: PositiveCount | None = Field(alias="hostMemory", default=None)
    """Memory limit of a worker's container, in bytes. Absent: the limit in its pod template."""

    controller_host_memory_bytes: PositiveCount | None = Field(alias="controllerHostMemory", default=None)
    """Memory limit of the controller's container, in bytes. Absent: the limit in its pod template."""

    shared_memory_bytes: PositiveCount | None = Field(alias="sharedMemory", default=None)
    """Size of /dev/shm in each pod, in bytes. Absent: the operator's default."""

    excluded_nodes: list[Annotated[str, Field(max_length=253)]] = Field(
        default_factory=list, max_length=16, json_schema_extra=ATOMIC
    )
    """Nodes that the job's pods avoid, because a foreign process held memory of a GPU there."""

    @property
    def rollout_sleep_level(self) -> Literal[0, 1, 2]:
        """vLLM's sleep level; 0 if the engine stays awake."""
        match self.rollout_sleep:
            case "Disabled":
                return 0
            case "Level1":
                return 1
            case "Level2":
                return 2
