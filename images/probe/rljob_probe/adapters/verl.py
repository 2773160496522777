"""Adapter for verl: changes the configuration that hydra composed from files and command line.

`ppo_mini_batch_size`, the batch of an optimizer step, stays: verl accumulates as many micro-batches as it needs.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable

from rljob_probe.adapters import Changes, divisor, guarded, say

MODULE = "hydra.main"

_ACTOR, _ROLLOUT, _REF, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
_MICRO_BATCHES = (
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_ACTOR}.ppo_micro_batch_size",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size",
    f"{_REF}.log_prob_micro_batch_size_per_gpu",
    f"{_REF}.log_prob_micro_batch_size",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size",
)
_TOKEN_BUDGETS = {
    f"{_ACTOR}.ppo_max_token_len_per_gpu": _ACTOR,
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": _ACTOR,
    f"{_REF}.log_prob_max_token_len_per_gpu": _REF,
    "critic.ppo_max_token_len_per_gpu": "critic",
}
"""Budgets of one GPU, and the section of the model that they are for."""
_GPUS_OF_A_SEQUENCE = (
    "ulysses_sequence_parallel_size",
    "fsdp_config.ulysses_sequence_parallel_size",
    "fsdp.ulysses_sequence_parallel_size",
    "veomni.ulysses_parallel_size",
    "megatron.context_parallel_size",
    "torchtitan.tensor_parallel_size",
)
"""Options whose GPUs put their budgets together for each micro-batch."""
_LEAST_SHARE = 0.05
_LEAST_BUCKET_MEGABYTES = 256


def patch(module: Any, changes: Changes) -> None:
    """Adapt the configuration of every program whose main function hydra calls, if it is verl's."""
    decorator = module.main

    @functools.wraps(decorator)
    def main(*given: Any, **named: Any) -> Callable[[Any], Any]:
        decorate = decorator(*given, **named)

        def of_function(function: Any) -> Any:
            @functools.wraps(function)
            def adapted(config: Any) -> Any:
                guarded("Verl", lambda found: _adapt_if_verl(found, changes))(config)
                return function(config)

            return decorate(adapted)

        return of_function

    module.main = main


def _adapt_if_verl(config: Any, changes: Changes) -> None:
    if "actor_rollout_ref" in config:
        say("; ".join(adapt(config, changes)) or "the memory plan changes no option of verl")


def adapt(config: Any, changes: Changes) -> list[str]:
    """Change the options in place; returns a line for each change, and for each that is not possible."""
    options = _Options(config)
    if changes.micro_batch < 1:
        _smaller_micro_batches(options, changes.micro_batch)
    if changes.activation_checkpointing:
        options.set(f"{_MODEL}.enable_gradient_checkpointing", True)
    if changes.optimizer_offload:
        engine = options.get(f"{_ACTOR}.strategy")
        if options.get(f"{_ACTOR}.{engine}") is None:
            engine = "fsdp_config"  # of the strategies fsdp and fsdp2
        options.set(f"{_ACTOR}.{engine}.optimizer_offload", True)
    if changes.rollout_sleep:
        options.set(f"{_ROLLOUT}.free_cache_engine", True)
    if changes.kv_cache < 1:
        options.scale(f"{_ROLLOUT}.gpu_memory_utilization", changes.kv_cache, least=_LEAST_SHARE)
    if changes.sync_bucket < 1:
        bucket = f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
        options.scale(bucket, changes.sync_bucket, least=_LEAST_BUCKET_MEGABYTES)
    if changes.empty_cache:
        options.lines.append("emptyCache is not possible: verl empties its cache by itself, and has no option for it")
    return options.lines


def _smaller_micro_batches(options: _Options, share: float) -> None:
    """Token budgets with dynamic batches, which hold at least the longest sequence; otherwise sequences."""
    if options.get(f"{_ACTOR}.use_dynamic_bsz"):
        lengths = (options.get("data.max_prompt_length"), options.get("data.max_response_length"))
        longest = sum(length for length in lengths if length)
        for budget, model in _TOKEN_BUDGETS.items():
            gpus = max(options.get(f"{model}.{name}") or 1 for name in _GPUS_OF_A_SEQUENCE)
            options.scale(budget, share, least=-(-longest // gpus))
        return
    all_gpus = (options.get("trainer.nnodes") or 1) * (options.get("trainer.n_gpus_per_node") or 1)
    for micro_batch in _MICRO_BATCHES:
        size = options.get(micro_batch)
        # verl divides a size of all GPUs among them, and refuses one that is smaller than their number.
        gpus = 1 if micro_batch.endswith("_per_gpu") else all_gpus
        if size and size % gpus == 0:
            options.set(micro_batch, gpus * divisor(size // gpus, share))


class _Options:
    """Options of a DictConfig by their dotted names. One that refers to another follows it, and is not changed."""

    def __init__(self, config: Any) -> None:
        self.lines: list[str] = []
        self._config = config
        self._omegaconf: Any = sys.modules["omegaconf"].OmegaConf  # hydra has imported it

    def get(self, name: str) -> Any:
        return self._omegaconf.select(self._config, name)

    def set(self, name: str, value: Any) -> None:
        parent, _, key = name.rpartition(".")
        section = self._omegaconf.select(self._config, parent)
        if section is None or key not in section:
            self.lines.append(f"{name} is not an option of this version")
        elif not self._omegaconf.is_interpolation(section, key) and section[key] != value:
            before = section[key]
            self._omegaconf.update(self._config, name, value)
            self.lines.append(f"{name} {before} -> {value}")

    def scale(self, name: str, share: float, *, least: float) -> None:
        """`share` of a number, but at least `least`, unless it was less before."""
        before = self.get(name)
        if before:
            scaled = type(before)(round(before * share, 3))
            self.set(name, max(scaled, min(type(before)(least), before)))
