"""The three roles of a job: controller, policy and rollout."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from rljob_api.api_model import ApiModel, FreeForm, Text, immutable
from rljob_api.pod_template import PodTemplate
from rljob_api.quantity import AutoOrCount

ENGINE_ARGS_SET_ELSEWHERE = {
    "dtype": "write spec.model.dtype",
    "enable_sleep_mode": "write spec.memory.rolloutSleep",
    "kv_cache_memory_bytes": "write spec.memory.kvCache",
    "load_format": "the policy's weights are sent to the engine",
    "logprobs_mode": "the loss depends on it",
    "max_model_len": "write spec.algorithm.maxPromptTokens and maxResponseTokens",
    "max_num_seqs": "write spec.rollout.maxConcurrentSequences",
    "model": "write spec.model.uri",
    "seed": "write spec.algorithm.seed",
    "tensor_parallel_size": "write spec.rollout.tensorParallelSize",
    "weight_transfer_config": "the trainer depends on it",
}
"""Arguments of vLLM that are set elsewhere, and where, or why."""


def _only_free_engine_args(args: FreeForm) -> FreeForm:
    taken = [f"{name} ({reason})" for name, reason in ENGINE_ARGS_SET_ELSEWHERE.items() if name in args]
    if taken:
        raise PydanticCustomError("conflict", "{message}", {"message": f"must not set {', '.join(taken)}: remove it"})
    return args


TorchVersion = Annotated[
    str, Text(pattern=r"^[0-9]+\.[0-9]+[0-9A-Za-z.+]*$", expected="a torch version such as 2.13.0", max_length=64)
]


class PolicySpec(ApiModel):
    """The pods that train the model."""

    replicas: int = Field(default=1, ge=1, le=1024, json_schema_extra=immutable())
    """Pods. With gpusPerReplica: 0, each holds one rank."""

    gpus_per_replica: int = Field(default=1, ge=0, le=16, json_schema_extra=immutable())
    """GPUs of a pod, one rank on each. 0: train on the CPU."""

    template: PodTemplate = PodTemplate()
    """Overrides of the pods."""


class RolloutSpec(ApiModel):
    """The engines that generate. Colocated: one on every GPU of the policy. Disaggregated: in pods of their own."""

    replicas: int | None = Field(default=None, ge=1, le=1024, json_schema_extra=immutable())
    """Pods, for topology Disaggregated. Absent: 1."""

    gpus_per_replica: int | None = Field(default=None, ge=0, le=16, json_schema_extra=immutable())
    """GPUs of a pod, for topology Disaggregated. Absent: 1."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=16, json_schema_extra=immutable())
    """GPUs that one engine spreads over."""

    max_concurrent_sequences: AutoOrCount = "Auto"
    """Sequences that one engine generates at the same time. Auto: all of its share of a step, at most 256."""

    engine_args: Annotated[FreeForm, AfterValidator(_only_free_engine_args)] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, by their Python names, such as enforce_eager: true."""

    template: PodTemplate | None = None
    """Overrides of the pods, for topology Disaggregated."""


class ControllerSpec(ApiModel):
    """The pod that drives the job. It never asks for a GPU."""

    require_gpu_free_node: bool = False
    """Wait for a node without GPUs. Otherwise a GPU node will do where there is no other, with the GPUs hidden."""

    template: PodTemplate = PodTemplate()
    """Overrides of the pod."""


SupportedSetting = Literal[
    "activationCheckpointing",
    "emptyCache",
    "expandableSegments",
    "logprobChunkTokens",
    "microBatchTokens",
    "optimizerOffload",
    "rolloutSleep",
    "syncBucketSize",
]
"""Settings of the memory plan that another trainer can take from its environment."""


class TrainerSpec(ApiModel):
    """Another trainer than RLJob's own. It finds the memory plan in its environment and answers by exit code."""

    image: str = Field(min_length=1, max_length=1024)
    """Container image."""

    command: list[Annotated[str, Field(max_length=4096)]] = Field(default_factory=list, max_length=64)
    """Entry point. Absent: the image's."""

    args: list[Annotated[str, Field(max_length=4096)]] = Field(default_factory=list, max_length=256)
    """Arguments of the entry point."""

    torch_version: TorchVersion | None = None
    """torch in the image, which decides what its CUDA allocator understands. Absent: only what every torch since 2.6
    understands is set."""

    probe: Literal["Enabled", "Disabled"] = "Enabled"
    """Enabled: a small package on PYTHONPATH notes why a Python process of the trainer runs out of memory, and leaves
    it as the termination message. It changes nothing else."""

    supported_settings: list[SupportedSetting] = Field(default=["expandableSegments"], max_length=16)
    """Settings of the memory plan that the trainer follows: after a failure these may be changed, beside the pods' host
    memory, /dev/shm and nodes. It finds each in its environment, as RLJOB_PLAN_MICRO_BATCH_TOKENS; expandableSegments
    comes as PYTORCH_CUDA_ALLOC_CONF, which torch itself reads. Without expandableSegments where vLLM runs in the same
    process: its sleep mode refuses them."""
