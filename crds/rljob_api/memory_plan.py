"""The memory plan: what `spec.memory` and the machine came to, with a generation number."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rljob_api.api_model import ApiModel
from rljob_api.memory_settings import RolloutSleep


class MemoryPlan(ApiModel):
    """Every setting that bears on memory, as a value. Sizes are bytes a GPU (or a process, on the CPU)."""

    generation: int = Field(default=1, ge=1)
    """Counts the changes of the plan, from 1."""

    empty_cache: bool
    """The policy gives its cached GPU memory back after an update."""

    expandable_segments: bool
    """The policy's allocator uses expandable segments."""

    rollout_sleep: RolloutSleep
    """vLLM's sleep mode during the update. Disabled: the engine stays awake."""

    kv_cache_bytes: int = Field(alias="kvCache", ge=1)
    """KV cache of one engine, in bytes on each of its GPUs."""

    micro_batch_tokens: int = Field(ge=1)
    """Tokens, padding included, that go through the policy at once."""

    logprob_chunk_tokens: int = Field(ge=1)
    """Tokens whose logits over the whole vocabulary exist at once."""

    activation_checkpointing: bool
    """Activations are computed again in the backward pass instead of kept."""

    optimizer_offload: bool
    """The optimizer's state stays in host memory between updates."""

    sync_bucket_bytes: int = Field(alias="syncBucketSize", ge=1)
    """Weights that are sent from the policy to the engine at once, in bytes."""

    detach_metrics: bool = True
    """What is kept of a micro-batch for the metrics is cut from its graph, and the batch freed after its last use."""

    weight_export: Literal["ReservedBuffer", "SwitchSegments"] = "SwitchSegments"
    """Where the weights are packed for CUDA IPC: in a buffer that is kept, or in one that is made for each sync while
    expandable segments are off."""

    host_memory_bytes: int | None = Field(alias="hostMemory", default=None, ge=1)
    """Host memory limit of a worker's container. Absent: what its template says."""

    controller_host_memory_bytes: int | None = Field(alias="controllerHostMemory", default=None, ge=1)
    """Host memory limit of the controller's container. Absent: what its template says."""

    shared_memory_bytes: int | None = Field(alias="sharedMemory", default=None, ge=1)
    """Size of /dev/shm in each pod. Absent: the operator's default."""

    excluded_nodes: list[str] = Field(
        default_factory=list, max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Nodes that the job's pods keep off: a GPU there had memory taken by a process that is no part of the job."""

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
