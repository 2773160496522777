"""Settings that affect memory. `Auto` leaves a setting to the memory plan; any other value pins it."""

from __future__ import annotations

from typing import Literal

from rljob_api.api_model import ApiModel, Toggle
from rljob_api.quantity import AutoOrBytes, AutoOrCount

RolloutSleep = Literal["Disabled", "Level1", "Level2"]
"""Sleep mode of a vLLM engine while the policy uses the GPU."""


class MemorySettings(ApiModel):
    """Settings that affect memory. With `Auto`, the memory plan chooses the value and may change it after an
    out-of-memory failure. Any other value pins the setting: RLJob never changes it."""

    mode: Literal["Auto", "Disabled"] = "Auto"
    """Auto: RLJob changes the memory plan after an out-of-memory failure and resumes the job. Disabled: RLJob never
    changes the first plan."""

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

    optimizer_offload: Toggle = "Auto"
    """If enabled, the optimizer state stays in host memory and streams through the GPU during an optimizer step. A
    reference model stays in host memory as well."""

    policy_offload: Toggle = "Auto"
    """If enabled, the weights of the policy, and of a reference model, stay in host memory while the engine on the same
    GPU generates. It has no effect with topology Disaggregated."""

    sync_bucket_size: AutoOrBytes = "Auto"
    """Maximum size of the weights that the policy sends to the engine at a time. A larger parameter is sent alone."""

    detach_metrics: Toggle = "Auto"
    """If enabled, the metrics that the policy keeps of a micro-batch are detached from the autograd graph. Disable it
    only to measure its effect."""

    weight_export: Literal["Auto", "ReservedBuffer", "SwitchSegments"] = "Auto"
    """Buffer for the weights that the policy shares with the engine on the same GPU through CUDA IPC. ReservedBuffer:
    keep one buffer for the whole job. SwitchSegments: allocate it in each sync, with expandable segments switched
    off."""
