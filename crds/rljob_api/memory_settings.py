"""Every setting that bears on memory. `Auto` leaves it to the memory plan; a value pins it."""

from __future__ import annotations

from typing import Literal

from rljob_api.api_model import ApiModel, Toggle
from rljob_api.quantity import AutoOrBytes, AutoOrCount

RolloutSleep = Literal["Disabled", "Level1", "Level2"]
"""Sleep mode of a vLLM engine while the policy uses the GPU."""


class MemorySettings(ApiModel):
    """`Auto`: the memory plan decides, and may change the setting after a failure. A value pins the setting."""

    mode: Literal["Auto", "Disabled"] = "Auto"
    """Auto: after an out-of-memory failure the memory plan is changed and the job goes on. Disabled: the first plan
    stays."""

    empty_cache: Toggle = "Auto"
    """Whether the policy gives its cached GPU memory back after an update, before the engine wakes."""

    expandable_segments: Toggle = "Auto"
    """Whether the policy's allocator uses expandable segments, against fragmentation."""

    rollout_sleep: Literal["Auto", RolloutSleep] = "Auto"
    """vLLM's sleep mode during the update. Level1 keeps the engine's weights in host memory, Level2 drops them."""

    kv_cache: AutoOrBytes = "Auto"
    """KV cache of one engine on one GPU (or of one engine on the CPU)."""

    micro_batch_tokens: AutoOrCount = "Auto"
    """Tokens, padding included, that go through the policy at once."""

    logprob_chunk_tokens: AutoOrCount = "Auto"
    """Tokens whose logits over the whole vocabulary exist at once."""

    activation_checkpointing: Toggle = "Auto"
    """Whether activations are computed again in the backward pass instead of kept."""

    optimizer_offload: Toggle = "Auto"
    """Whether the optimizer's state stays in host memory between updates."""

    sync_bucket_size: AutoOrBytes = "Auto"
    """Weights that are sent from the policy to the engine at once."""

    detach_metrics: Toggle = "Auto"
    """Whether what is kept of a micro-batch for the metrics is cut from its autograd graph. Disabled serves to measure
    what that is worth."""

    weight_export: Literal["Auto", "ReservedBuffer", "SwitchSegments"] = "Auto"
    """Where the weights are packed for the engine on the same GPU: ReservedBuffer keeps a buffer for it, SwitchSegments
    makes one for each sync while expandable segments are off."""
