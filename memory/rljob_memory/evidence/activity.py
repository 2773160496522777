"""The activity of a program when it failed, from the names in its stack."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum


class Activity(StrEnum):
    """An activity, worded to follow `during`."""

    WAKE = "waking the engine up"
    SLEEP = "putting the engine to sleep"
    PINNING = "pinning host memory"
    OPTIMIZER = "the optimizer's step"
    WEIGHT_SYNC = "the weight sync"
    CHECKPOINT = "saving or loading a checkpoint"
    MODEL_LOAD = "loading the model"
    KV_CACHE = "allocating the KV cache"
    ENGINE_WARM_UP = "the engine's warm-up"
    LOGITS = "computing logits or log-probabilities"
    BACKWARD = "the backward pass"
    GENERATION = "generation"
    FORWARD = "the forward pass"


_NAMES: tuple[tuple[Activity, str], ...] = (
    (Activity.WAKE, r"wake_up|create_and_map|resume_memory_occupation"),
    (Activity.SLEEP, r"in sleep\b|\.sleep\(level|release_memory_occupation"),
    (Activity.PINNING, r"pin_memory|cudaHostAlloc|CachingHostAllocator"),
    (
        Activity.OPTIMIZER,
        r"torch/optim/(?!lr_scheduler)|_init_group|exp_avg|optimizer\.step|optimizer_step|_multi_tensor_|sharded_optim",
    ),
    (
        Activity.WEIGHT_SYNC,
        r"update_weights|sync_weights|weight_sync|full_tensor|gather_full|summon_full_params"
        r"|get_per_tensor_param|_model_to_vllm|GatheredParameters|partition_parameters\.py in _all_?gather"
        r"|sharding_manager|broadcast_to_(?:vllm|engine)|reload_weights|sync_model_weights",
    ),
    (Activity.CHECKPOINT, r"save_checkpoint|load_checkpoint|save_pretrained|save_model|torch\.save\("),
    (
        Activity.MODEL_LOAD,
        r"from_pretrained|in load_model\b|_auto_wrap|_sync_params_and_buffers|fully_shard\(|\bmodel\.(?:to|cuda)\(",
    ),
    (Activity.KV_CACHE, r"initialize_kv_cache|allocate_kv_cache|initialize_cache|_init_kv_cache|in kv_cache"),
    (
        Activity.ENGINE_WARM_UP,
        r"profile_run|determine_(?:num_)?available|capture_model|_dummy_run|_dummy_sampler_run|compile_or_warm_up",
    ),
    (
        Activity.LOGITS,
        r"log_softmax|cross_entropy|logits[\w\[\], :.-]*\.(?:float|to|clone|log_softmax)\(|compute_log_?probs?"
        r"|logprobs_from_logits|selective_log_softmax|_get_per_token_logps|lm_head|entropy_from_logits|logsumexp"
        r"|vocab_parallel",
    ),
    (Activity.BACKWARD, r"\.backward\(|in backward\b|run_backward"),
    (Activity.GENERATION, r"execute_model|generate_sequences|in generate\b"),
)
_PATTERNS = tuple((activity, re.compile(names)) for activity, names in _NAMES)
_FORWARD = re.compile(r"in \w*forward\b|_call_impl|compute_loss|training_step")


def activity_of(stack: Sequence[str]) -> Activity | None:
    """The activity of a stack, given as lines with the outermost frame first; None if no line names one.

    The innermost line counts: Lightning runs the whole training step inside `optimizer.step(closure)`. `forward` counts
    only if nothing else does, since most stacks contain it.
    """
    for line in reversed(stack):
        for activity, pattern in _PATTERNS:
            if pattern.search(line):
                return activity
    return Activity.FORWARD if any(_FORWARD.search(line) for line in stack) else None
