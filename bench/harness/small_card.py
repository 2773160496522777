"""The memory plan of a smaller GPU than the machine has, since the driver reports the memory of the whole GPU."""

from __future__ import annotations

from typing import Any

from rljob_api.job import RLJobSpec
from rljob_memory.plan import Hardware, first_plan
from rljob_memory.planning.job_workload import workload_of
from rljob_trainer.hardware import this_machine, torch_version
from rljob_trainer.models.checkpoint import model_dimensions
from rljob_trainer.models.lora_targets import adapted_layers, adapter_parameters
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.runtime.role_settings import shape_for_plan


def pinned_to_a_card(job: dict[str, Any], card_bytes: int) -> dict[str, Any]:
    """`spec.memory` of the spec `job`, with the sizes of its plan for a GPU of `card_bytes`. Resolves the model."""
    spec = RLJobSpec.model_validate(job, by_alias=True, by_name=False)
    directory, lora = resolve_model(spec.model.uri), spec.policy.lora
    in_adapters = adapter_parameters(adapted_layers(directory, lora.targets, lora.rank), lora.rank) if lora else 0
    shape = shape_for_plan(model_dimensions(directory), spec, "cuda", in_adapters)
    hardware = Hardware("cuda", card_bytes, this_machine().host_memory_bytes, torch_version())
    plan = first_plan(spec.memory, hardware, shape, workload_of(spec), fused=True)
    return {
        "kvCache": str(plan.kv_cache_bytes),
        "microBatchTokens": plan.micro_batch_tokens,
        "logprobChunkTokens": plan.logprob_chunk_tokens,
        "activationCheckpointing": "Enabled" if plan.activation_checkpointing else "Disabled",
        "optimizerOffload": "Enabled" if plan.optimizer_offload else "Disabled",
        "policyOffload": "Enabled" if plan.policy_offload else "Disabled",
        "syncBucketSize": str(plan.sync_bucket_bytes),
    }
