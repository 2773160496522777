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
    "load_format": "the policy sends its weights to the engine",
    "logprobs_mode": "the loss depends on it",
    "max_model_len": "write spec.algorithm.maxPromptTokens and maxResponseTokens",
    "max_num_seqs": "write spec.rollout.maxConcurrentSequences",
    "model": "write spec.model.uri",
    "seed": "write spec.algorithm.seed",
    "tensor_parallel_size": "write spec.rollout.tensorParallelSize",
    "weight_transfer_config": "the trainer depends on it",
}
"""vLLM arguments that engineArgs must not set, with the field to write instead, or the reason."""


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
    """Number of pods. With gpusPerReplica: 0, each pod runs one rank."""

    gpus_per_replica: int = Field(default=1, ge=0, le=16, json_schema_extra=immutable())
    """GPUs per pod. Each GPU runs one rank. 0: train on the CPU."""

    template: PodTemplate = PodTemplate()
    """Overrides of the policy's pods."""


class RolloutSpec(ApiModel):
    """The engines that generate responses. Colocated: one engine on every GPU of the policy. Disaggregated: engines in
    their own pods."""

    replicas: int | None = Field(default=None, ge=1, le=1024, json_schema_extra=immutable())
    """Number of pods, for topology Disaggregated only. Absent: 1."""

    gpus_per_replica: int | None = Field(default=None, ge=0, le=16, json_schema_extra=immutable())
    """GPUs per pod, for topology Disaggregated only. Absent: 1."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=16, json_schema_extra=immutable())
    """GPUs per engine."""

    max_concurrent_sequences: AutoOrCount = "Auto"
    """Maximum sequences that one engine generates at a time. Auto: its whole share of a step, at most 256."""

    engine_args: Annotated[FreeForm, AfterValidator(_only_free_engine_args)] = Field(default_factory=dict)
    """Further arguments of the vLLM engine, by their Python names, such as enforce_eager: true."""

    template: PodTemplate | None = None
    """Overrides of the rollout's pods, for topology Disaggregated only."""


class ControllerSpec(ApiModel):
    """The pod that drives the job. It never requests a GPU."""

    require_gpu_free_node: bool = False
    """If true, the controller waits for a node without GPUs. If false, it may run on a GPU node, with the GPUs hidden
    from it, if the cluster has no other node."""

    template: PodTemplate = PodTemplate()
    """Overrides of the controller's pod."""


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
"""Settings of the memory plan that another trainer can read from its environment."""


class TrainerSpec(ApiModel):
    """Another trainer, to run instead of RLJob's own. It reads the memory plan from its environment and reports
    failures by exit code."""

    image: str = Field(min_length=1, max_length=1024)
    """Container image of the trainer."""

    command: list[Annotated[str, Field(max_length=4096)]] = Field(default_factory=list, max_length=64)
    """Entry point. Absent: the image's entry point."""

    args: list[Annotated[str, Field(max_length=4096)]] = Field(default_factory=list, max_length=256)
    """Arguments of the entry point."""

    torch_version: TorchVersion | None = None
    """Version of torch in the image, which determines the allocator settings that RLJob can use. Absent: RLJob only
    uses settings that every torch since 2.6 supports."""

    probe: Literal["Enabled", "Disabled"] = "Enabled"
    """If enabled, a small package on PYTHONPATH records the cause if a Python process of the trainer runs out of
    memory, and writes it as the termination message. It changes nothing else."""

    supported_settings: list[SupportedSetting] = Field(default=["expandableSegments"], max_length=16)
    """Settings of the memory plan that the trainer reads from its environment, such as RLJOB_PLAN_MICRO_BATCH_TOKENS.
    After a failure, RLJob changes only these, and the host memory, /dev/shm and nodes of the pods. expandableSegments
    is set in PYTORCH_CUDA_ALLOC_CONF, which torch reads; omit it if vLLM runs in the same process, because vLLM's sleep
    mode does not support expandable segments."""
