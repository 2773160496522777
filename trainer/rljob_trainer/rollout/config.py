"""Settings of a rollout engine, its vLLM arguments and its environment variables. Free of vLLM."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rljob_api.algorithm import AlgorithmSpec
from rljob_client.errors import BadInput


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Settings of one engine."""

    model_dir: Path
    """Architecture and tokenizer, in Hugging Face format. The weights come from the policy."""

    device: Literal["cpu", "cuda"]

    dtype: Literal["float32", "bfloat16"]

    max_model_len: int
    """Maximum tokens of prompt and response together."""

    max_num_seqs: int
    """Maximum sequences that are generated concurrently."""

    kv_cache_bytes: int
    """Size of the KV cache in each process. It is fixed, so it is the same in every attempt."""

    algorithm: AlgorithmSpec
    """Sampling, the length of responses and the seed."""

    sleep_level: Literal[0, 1, 2] = 0
    """GPU memory that vLLM frees while it sleeps. 1: moves the weights to host memory; 2: drops them; 0: the engine
    does not sleep."""

    quantization: str | None = None
    """vLLM's name of the quantization of the weights; None: they keep `dtype`."""

    kv_cache_dtype: str = "auto"
    """vLLM's name of the KV cache's data type."""

    tensor_parallel_size: int = 1
    """Processes of the engine. Each has one GPU, a part of every weight, and a part of the KV cache."""

    engine_args: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of `vllm.LLM`."""

    @property
    def truncates(self) -> bool:
        """True if some tokens are never sampled, although they have a probability."""
        return self.algorithm.top_p < 1 or self.algorithm.top_k > 0 or self.algorithm.min_p > 0

    @property
    def logit_scale(self) -> float:
        """Factor of the logits in the model, instead of the sampler's temperature.

        vLLM returns log-probabilities either of the logits as they are, or after temperature and truncation. The policy
        divides by the temperature and does not truncate.
        """
        return 1 / self.algorithm.temperature if self.truncates else 1.0


# The KV cache is given in bytes: vLLM only requires this fraction of memory to be free when it starts. It is small
# because the policy occupies the same GPU.
_START_CHECK_FRACTION = 0.01


SET_BY_TRAINER = frozenset(
    """
    distributed_executor_backend dtype enable_sleep_mode kv_cache_dtype kv_cache_memory_bytes load_format logprobs_mode
    max_model_len model quantization seed tensor_parallel_size weight_transfer_config
    """.split()  # noqa: SIM905
)
"""Arguments of `vllm.LLM` with values that other settings of the manifest determine."""

OF_THE_MODEL = frozenset(
    """
    code_revision config_format convert generation_config hf_config_path hf_overrides logits_processors
    override_generation_config revision runner skip_tokenizer_init tokenizer tokenizer_mode tokenizer_revision
    trust_remote_code
    """.split()  # noqa: SIM905
)
"""Arguments that change what the engine reads from the model's files, or its distribution. The policy, the prompts and
the exported model would not follow."""


OF_SPECULATION = frozenset({"spec_method", "spec_model", "spec_tokens", "speculative_config"})
"""Arguments of speculative decoding. Log-probabilities are wrong with it on CPUs, and steps are slower on GPUs
(docs/performance.md)."""


def refused_argument(name: str) -> str | None:
    """The reason that `rollout.engineArgs` must not contain `name`; None if it may."""
    if name in SET_BY_TRAINER:
        return "the trainer sets this argument; remove it"
    if name in OF_SPECULATION:
        return "training needs exact log-probabilities, which speculative decoding does not always give; remove it"
    if name in OF_THE_MODEL:
        return "it would change the engine but not the policy; remove it, and change the files of the model instead"
    return None


def engine_arguments(config: RolloutConfig, vllm_arguments: Collection[str]) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`, without the weight-transfer configuration.

    `vllm_arguments`: names that the installed vLLM accepts. Raises `BadInput` if `config.engine_args` contains another
    name, or a refused one.
    """
    for name in config.engine_args:
        if reason := refused_argument(name):
            raise BadInput(f"rollout.engineArgs: expected no {name}: {reason}")
        if name not in vllm_arguments:
            raise BadInput(
                f"rollout.engineArgs: expected engine arguments of the installed vLLM, found {name}; remove it"
            )
    return _default_arguments(config) | config.engine_args | _fixed_arguments(config)


def _fixed_arguments(config: RolloutConfig) -> dict[str, Any]:
    return {
        "model": str(config.model_dir),
        # As in the policy, which does not round logits to 16 bits either. An engine in 8 bits differs by far more.
        "hf_overrides": {"head_dtype": "model" if config.quantization else "float32"},
        # The first sync sends the weights: reading the checkpoint here would waste time and host memory.
        "load_format": "dummy",
        "dtype": config.dtype,
        "seed": config.algorithm.seed,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_model_len": config.max_model_len,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "kv_cache_dtype": config.kv_cache_dtype,
        "quantization": config.quantization,
        "enable_sleep_mode": config.device == "cuda" and config.sleep_level > 0,
        # The policy computes log-probabilities of logits / temperature; vLLM must do the same (`logit_scale`).
        "logprobs_mode": "raw_logprobs" if config.truncates else "processed_logprobs",
    }


def _default_arguments(config: RolloutConfig) -> dict[str, Any]:
    common = {"max_num_seqs": config.max_num_seqs, "disable_log_stats": True}
    if config.device == "cpu":
        return common | {"enforce_eager": True}
    compilation: dict[str, Any] = {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": graph_sizes(config.max_num_seqs),
    }
    if config.tensor_parallel_size > 1:
        # vLLM enables it if FlashInfer is installed, whose kernels were not tried with processes that Ray starts.
        compilation["pass_config"] = {"fuse_allreduce_rms": False}
    return common | {
        "gpu_memory_utilization": _START_CHECK_FRACTION,
        # Prefill is a step or two of a whole rollout: graphs for it cost more time than they save.
        "compilation_config": compilation,
    }


def graph_sizes(most: int) -> list[int]:
    """Numbers of sequences for which a decoding step is captured as a CUDA graph; a step in between is padded.

    Each is at most half as large again as the one before it, up to `most` sequences or vLLM's limit of 512. vLLM's own
    list has steps of 8, and takes several times as long to capture (1, 2, 4, 8, 16, 24, … 256, 272, …).
    """
    powers = [1 << exponent for exponent in range(10)]
    between = [3 * power // 2 for power in powers[4:]]
    most = min(most, powers[-1])
    return sorted({size for size in (*powers, *between, most) if size <= most})


SEES_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Variable with which Ray does not hide the other GPUs of the machine or pod from a process."""


def peer_environment(device: str, tensor_parallel_size: int) -> dict[str, str]:
    """Variables of a process that opens the memory of its engine's other processes, for vLLM's own all-reduce."""
    return {SEES_ALL_GPUS: "1"} if device == "cuda" and tensor_parallel_size > 1 else {}


def engine_environment(device: str) -> dict[str, str]:
    """Variables to set before vLLM is imported, except the number of threads. `device`: "cpu" or "cuda"."""
    common = {
        # The engine runs in the actor's process: one process fewer, and one copy of the weights fewer.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cuda":
        # VLLM_USE_V2_MODEL_RUNNER stays unset: vLLM 0.26 uses V2, whose sampler takes a seed for each request at no
        # cost, for all dense models, and warns in the log if a feature in rollout.engineArgs requires V1.
        # Symmetric memory compares the numbers of GPUs, and each process of an engine calls its own GPU 0.
        # vLLM sets the second one too, before it imports torch's compiler; a warm process has imported that.
        return common | {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return common | {
        # enforce_eager alone still compiles a few functions with a C++ compiler on the first request.
        "TORCH_COMPILE_DISABLE": "1",
        # Policy and engine take turns on the same cores: pinned threads would compete.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
