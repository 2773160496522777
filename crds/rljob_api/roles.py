"""The three roles of a job: controller, policy and rollout."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from rljob_api.api_model import ApiModel, FreeForm, Rule, Text, immutable
from rljob_api.quantity import AutoOrCount, AutoOrEngineSize


class PodTemplate(ApiModel):
    """Overrides of the pods of a role, as in a Kubernetes PodTemplate. The operator merges them over its own pod by
    strategic merge."""

    metadata: FreeForm = Field(default_factory=dict)
    """Labels and annotations to add."""

    spec: FreeForm = Field(default_factory=dict)
    """PodSpec fields to add or override, such as nodeSelector, tolerations, volumes, or resources of the container
    rljob."""


class OptimizerSpec(ApiModel):
    """The optimizer of the policy: AdamW with float32 master weights. Its learning rate, betas and weight decay are
    under `algorithm`."""

    moments: Literal["float32", "bfloat16", "int8"] = Field(default="float32", json_schema_extra=immutable())
    """Data type of AdamW's two moments. bfloat16 halves their memory and the time to stream them, int8 quarters both.
    bfloat16 moments are rounded stochastically. int8 moments are quantized in blocks of 256, each with a float32 scale;
    updates differ from those with float32 by a few percent."""


ModuleName = Annotated[
    str,
    Text(
        pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$",
        expected="the name of a linear layer, such as q_proj or self_attn.q_proj",
        max_length=128,
    ),
]


class LoraSpec(ApiModel):
    """Low-rank adapters. Each weight W of a target is frozen and replaced by W + alpha / rank * B * A, of which the two
    small matrices A and B are trained. The learning rate should be about ten times that of full training."""

    rank: int = Field(default=16, ge=1, le=1024, json_schema_extra=immutable())
    """Rank of the adapters."""

    alpha: float = Field(default=32.0, gt=0, le=65_536, json_schema_extra=immutable())
    """Scale of the adapters: B * A is multiplied by alpha / rank."""

    targets: list[ModuleName] = Field(default=[], max_length=64, json_schema_extra=immutable())
    """Linear layers that get an adapter, by the end of their names, such as q_proj. Empty: all linear layers of the
    decoder layers."""

    dropout: float = Field(default=0.0, ge=0, lt=1, json_schema_extra=immutable())
    """Probability with which an input of an adapter is dropped in training. The engine has no dropout, so its
    log-probabilities differ from the policy's if this is above 0."""

    export: Literal["Merged", "Adapter"] = "Merged"
    """Model that is written when the job completes. Merged: the whole model, with the adapters added to its weights.
    Adapter: the adapters alone, in the format of peft."""


ENGINE_ARGS_SET_ELSEWHERE = {
    "distributed_executor_backend": "the trainer starts the processes of an engine",
    "dtype": "write spec.model.dtype",
    "enable_sleep_mode": "write spec.memory.rolloutSleep",
    "kv_cache_dtype": "write spec.rollout.kvCacheDtype",
    "kv_cache_memory_bytes": "write spec.memory.kvCache",
    "load_format": "the policy sends its weights to the engine",
    "logprobs_mode": "the loss depends on it",
    "max_model_len": "write spec.algorithm.maxPromptTokens and maxResponseTokens",
    "max_num_seqs": "write spec.rollout.maxConcurrentSequences",
    "model": "write spec.model.uri",
    "quantization": "write spec.rollout.quantization",
    "seed": "write spec.algorithm.seed",
    "tensor_parallel_size": "write spec.rollout.tensorParallelSize",
    "weight_transfer_config": "the trainer depends on it",
}
"""vLLM arguments that engineArgs must not set, with the field to write instead, or the reason."""


def _check_engine_args(args: FreeForm) -> FreeForm:
    names = {name.lstrip("-").replace("-", "_") for name in args}
    conflicts = [f"{name} ({reason})" for name, reason in ENGINE_ARGS_SET_ELSEWHERE.items() if name in names]
    if conflicts:
        message = f"must not set {', '.join(conflicts)}: remove it"
        raise PydanticCustomError("conflict", "{message}", {"message": message})
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

    lora: LoraSpec | None = None
    """Low-rank adapters, which are trained instead of the model's weights. Absent: all weights are trained."""

    optimizer: OptimizerSpec = OptimizerSpec()
    """Settings of the optimizer."""

    template: PodTemplate = PodTemplate()
    """Overrides of the policy's pods."""


class RolloutSpec(ApiModel):
    """The engines that generate responses. Colocated: engines on the GPUs of the policy. Disaggregated: engines in
    their own pods."""

    replicas: int | None = Field(default=None, ge=1, le=1024, json_schema_extra=immutable())
    """Number of pods, for topology Disaggregated only. Absent: 1."""

    gpus_per_replica: int | None = Field(default=None, ge=0, le=16, json_schema_extra=immutable())
    """GPUs per pod, for topology Disaggregated only. Every tensorParallelSize of them run one engine. 0: generate on
    the CPU. Absent: 1."""

    # Not a default of the schema: the API server would store a value that an older version, rolled back to, refuses.
    tensor_parallel_size: AutoOrEngineSize = Field(default_factory=lambda: "Auto", json_schema_extra=immutable())
    """GPUs per engine, which divide its weights and its KV cache among them. Auto, or absent: the memory plan chooses
    the size with the fewest predicted seconds; 1 without GPUs and with another trainer. A number must divide the GPUs
    of the pod, and suit the model's attention heads and MLP. Without GPUs (topology Disaggregated only): number of
    processes of the single engine of each pod."""

    max_concurrent_sequences: AutoOrCount = "Auto"
    """Maximum sequences that one engine generates at a time. Auto: its whole share of a step, at most 256."""

    quantization: Literal["Disabled", "Fp8PerTensor", "Fp8PerChannel", "Fp8PerBlock"] = "Disabled"
    """Quantization of the engine's weights to 8 bits at each weight sync. Fp8PerTensor has one scale for each weight,
    Fp8PerChannel one for each of its rows, Fp8PerBlock one for each block of 128 x 128. It requires a GPU of compute
    capability 8.9 or newer, and importance sampling. The policy is not quantized."""

    kv_cache_dtype: Literal["Auto", "Fp8"] = "Auto"
    """Data type of the KV cache. Auto: that of the weights. Fp8: 8 bits with a scale of 1, so that twice as many tokens
    fit. It requires a GPU of compute capability 8.9 or newer, and importance sampling."""

    engine_args: Annotated[FreeForm, AfterValidator(_check_engine_args)] = Field(default_factory=dict)
    """Further arguments of the vLLM engine, by their Python names, such as enforce_eager: true."""

    template: PodTemplate | None = None
    """Overrides of the rollout's pods, for topology Disaggregated only."""

    @property
    def given_tensor_parallel_size(self) -> int:
        """The number in the manifest; 1 if it is Auto, and the memory plan has the size."""
        return 1 if self.tensor_parallel_size == "Auto" else self.tensor_parallel_size


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


Adapter = Literal["TRL", "Verl"]

ADAPTER_SETTINGS: dict[Adapter, frozenset[str]] = {
    "TRL": frozenset({"activationCheckpointing", "emptyCache", "kvCache", "microBatchTokens", "rolloutSleep"}),
    "Verl": frozenset(
        {
            "activationCheckpointing",
            "kvCache",
            "microBatchTokens",
            "optimizerOffload",
            "rolloutSleep",
            "syncBucketSize",
        }
    ),
}
"""Settings of the memory plan that an adapter (rljob_probe.adapters) maps to options of its trainer."""


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

    adapter: Adapter | None = None
    """Program whose own options RLJob changes after an out-of-memory failure, without a change of the script. TRL: the
    configuration of every trainer that uses transformers' TrainingArguments. Verl: the configuration of verl. The batch
    of an optimizer step stays the same. It requires the probe. Absent: only supportedSettings are changed."""

    supported_settings: list[SupportedSetting] = Field(default=["expandableSegments"], max_length=16)
    """Settings of the memory plan that the trainer reads from its environment, such as RLJOB_PLAN_MICRO_BATCH_TOKENS.
    After a failure, RLJob changes only these, and the host memory, /dev/shm and nodes of the pods. expandableSegments
    is set in PYTORCH_CUDA_ALLOC_CONF, which torch reads; omit it if vLLM runs in the same process, because vLLM's sleep
    mode does not support expandable segments."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.adapter) || self.probe == 'Enabled'",
            holds=lambda trainer: trainer.adapter is None or trainer.probe == "Enabled",
            field="adapter",
            message="requires the probe, which contains the adapters: remove probe: Disabled, or adapter",
        ),
    )

    @property
    def changeable_settings(self) -> frozenset[str]:
        """Settings that take effect in the trainer: by its environment, or by the adapter."""
        return frozenset(self.supported_settings) | (ADAPTER_SETTINGS[self.adapter] if self.adapter else frozenset())
