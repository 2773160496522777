"""Fills the blocks of a page that are generated from recorded results.

A block begins with `<!-- from bench/results/NAME.json -->` and ends with `<!-- end -->`. A page may show one result in
several blocks: `<!-- from bench/results/NAME.json: BLOCK -->`. A block that reads several results has a pattern as its
name: `<!-- from bench/results/*.json: BLOCK -->`. The prose around the blocks is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from bench.report import (
    adapter_recovery,
    checkpoints,
    confusion_matrix,
    freed_bytes,
    goals,
    host_memory,
    large_models,
    load_memory,
    mitigations,
    operator,
    optimizer_curves,
    public_failures,
    recoveries,
    rollouts,
    soak,
    supported_models,
    topologies,
    training,
)
from bench.report.markdown import Result, read

Render = Callable[[Result], str]

BLOCKS: Mapping[str, Render] = {
    "h200_step": training.step,
    "large_models": large_models.block,
    "h100/large_models": large_models.block,
    "adapters_and_8_bits": large_models.adapters,
    "h100/adapters_and_8_bits": large_models.adapters,
    "rounding_to_8_bits": large_models.rounding_to_8_bits,
    "host_memory": host_memory.block,
    "load_memory": load_memory.block,
    "checkpoints": checkpoints.block,
    "rollout_engine": rollouts.logprobs,
    "rollout_engine_h200": rollouts.logprobs,
    "rollout_queue": rollouts.queue,
    "queue_steps": rollouts.queue_steps,
    "smollm2_chain_sum": training.chain_sum,
    "smollm2_chain_sum_cpu": training.chain_sum_cpu,
    "smollm2_lora": training.chain_sum,
    "optimizer_curves": optimizer_curves.block,
    "optimizer_curves_smollm2": optimizer_curves.block,
    "optimizer_curves_qwen3": optimizer_curves.block,
    "overhead": training.overhead,
    "probe_overhead": training.probe,
    "probe_overhead_gpu": training.probe_on_gpu,
    "adapter_recovery": adapter_recovery.block,
    "trl_failures": adapter_recovery.failures_of_trl,
    "h100/trl_failures": adapter_recovery.failures_of_trl,
    "verl_failures": adapter_recovery.failures_of_verl,
    "memory_telemetry": training.telemetry,
    "operator_scale": operator.scale,
    "operator_duel": operator.duel,
    "operator_large": operator.large,
    "operator_single_job": operator.single_job,
    "operator_large_templates": operator.large_templates,
    "cluster_job": operator.cluster_job,
    "recovery_in_pods": recoveries.recovery_in_pods,
    "recovered_jobs": recoveries.recovered_jobs,
    "recovered_jobs: freed bytes": freed_bytes.block,
    "ranks_recover": recoveries.ranks_recover,
    "ranks_recover_cpu": recoveries.ranks_recover,
    "recovery_time": recoveries.recovery_time,
    "recovery_time_h200": recoveries.recovery_time,
    "soak": soak.block,
    "soak_topologies": soak.block,
    "supported_models": supported_models.block,
    "induced_failures": confusion_matrix.block,
    "public_failures_thirteenth": public_failures.block,
    "memory_mitigation_cost": mitigations.costs,
    "memory_cache": mitigations.cache,
    "memory_retained": mitigations.retained,
    "memory_small_card": mitigations.small_card,
    "memory_controller": mitigations.controller,
    "memory_rollout_role": mitigations.rollout_role,
    "h100/memory_rollout_role": mitigations.rollout_role,
    "topologies": topologies.topologies,
    "tensor_parallel": topologies.tensor_parallel,
}
"""Renderers by the name of the result, and of the block if there are several."""

BLOCKS_OF_SEVERAL: Mapping[str, Callable[[], str]] = {
    "*: goals": goals.block,
    "public_failures_*: every set": public_failures.every_set,
}
"""Renderers that read several results themselves, by the pattern of their names, and the name of the block."""

_BLOCK = re.compile(r"<!-- from bench/results/([\w/*]+)\.json((?:: [^>]+)?) -->\n.*?<!-- end -->\n", re.DOTALL)


class UnknownBlock(Exception):
    """A page has a mark that no renderer is registered for."""


def fill(page: str) -> str:
    """`page` with each block rendered again. Raises UnknownBlock."""
    return _BLOCK.sub(_filled, page)


def _filled(block: re.Match[str]) -> str:
    mark = block[0].partition("\n")[0]
    return f"{mark}\n{_rendered(block[1], block[2])}<!-- end -->\n"


def _rendered(result: str, block: str) -> str:
    name = f"{result}{block}"
    if name in BLOCKS_OF_SEVERAL:
        return BLOCKS_OF_SEVERAL[name]()
    if name not in BLOCKS:
        raise UnknownBlock(f"expected one of {', '.join([*BLOCKS, *BLOCKS_OF_SEVERAL])}; found the mark of {name}")
    return BLOCKS[name](read(result))
