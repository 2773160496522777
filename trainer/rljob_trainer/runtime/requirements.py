"""Requirements of a job on its model that `config.json` alone shows: they are checked before the weights are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.job import RLJobSpec
from rljob_api.manifest.yaml_document import Path as FieldPath
from rljob_client.errors import BadInput
from rljob_client.model_files import read_config
from rljob_memory.engine_sizes import BLOCK, divides, uneven_inputs
from rljob_trainer.hardware import Device
from rljob_trainer.models.checkpoint import described_positions, require_same_rope
from rljob_trainer.models.consistency import require_same_window
from rljob_trainer.models.lora_targets import require_adaptable
from rljob_trainer.rollout.engine_fields import installed_values


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement. Its check reads no weights, which may be missing."""

    name: str
    """Subject of the check, for messages."""

    field: FieldPath
    """The field of the manifest that a failure concerns."""

    require: Callable[[Path], None]
    """Raises `BadInput` if the model in a directory does not meet it."""


def model_requirements(spec: RLJobSpec) -> tuple[Requirement, ...]:
    """The requirements of the job, in the order of their checks."""
    algorithm, rollout, lora = spec.algorithm, spec.rollout, spec.policy.lora
    found = [
        Requirement(
            "the lengths", ("spec", "algorithm", "maxPromptTokens"), lambda at: _require_lengths(algorithm, at)
        ),
        Requirement(
            "the engine",
            ("spec", "rollout", "tensorParallelSize"),
            lambda at: require_shardable(at, rollout.given_tensor_parallel_size),
        ),
    ]
    if rollout.quantization == "Fp8PerBlock":
        found.append(
            Requirement(
                "the engine",
                ("spec", "rollout", "quantization"),
                lambda at: require_whole_blocks(at, rollout.given_tensor_parallel_size),
            )
        )
    if lora is not None:
        found.append(
            Requirement(
                "the adapters",
                ("spec", "policy", "lora"),
                lambda at: require_adaptable(at, lora.targets, lora.rank),
            )
        )
    return tuple(found)


def require_usable(spec: RLJobSpec, directory: Path) -> None:
    """Raise `BadInput` if `config.json` in `directory` shows that the job cannot use the model."""
    for requirement in model_requirements(spec):
        requirement.require(directory)


def _require_lengths(algorithm: AlgorithmSpec, directory: Path) -> None:
    """Prompt and response together must not exceed the model's maximum length, and have the same embeddings."""
    longest = algorithm.max_prompt_tokens + algorithm.max_response_tokens
    positions = described_positions(directory)
    if longest > positions:
        raise BadInput(
            "expected algorithm.maxPromptTokens + algorithm.maxResponseTokens to be at most "
            f"{positions}, the maximum length of the model, found {longest}; lower them"
        )
    require_same_rope(directory, longest)
    require_same_window(directory, longest)


def require_shardable(directory: Path, tensor_parallel_size: int) -> None:
    """Raise `BadInput` if vLLM cannot divide the model in `directory` by `tensor_parallel_size`.

    Weights may be missing; a configuration without the numbers that decide is left to vLLM.
    """
    config = read_config(directory)
    heads, width = config.get("num_attention_heads"), config.get("intermediate_size")
    kv_heads = config.get("num_key_value_heads") or heads
    if not (isinstance(heads, int) and isinstance(width, int) and isinstance(kv_heads, int)):
        return
    possible = [size for size in range(1, heads + 1) if divides(size, heads, kv_heads, width)]
    if tensor_parallel_size not in possible:
        raise BadInput(
            f"expected rollout.tensorParallelSize to suit the model's {heads} attention heads, {kv_heads} key-value "
            f"heads and MLP of {width}, found {tensor_parallel_size}; write "
            f"{' or '.join(map(str, possible[:6]))}"
        )


def require_whole_blocks(directory: Path, tensor_parallel_size: int) -> None:
    """Raise `BadInput` if vLLM cannot divide the inputs of the linear layers of the model in `directory` into blocks.

    Weights may be missing; a configuration without the numbers that decide is left to vLLM.
    """
    config = read_config(directory)
    hidden, heads, width = (config.get(name) for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    if not (isinstance(hidden, int) and isinstance(heads, int) and isinstance(width, int)):
        return
    head_dim = config.get("head_dim") or hidden // heads
    inputs = uneven_inputs(tensor_parallel_size, hidden, heads * head_dim, width)
    if uneven := [f"{name}: {count}" for name, count in inputs.items()]:
        of_each = f" in each of {tensor_parallel_size} processes" if tensor_parallel_size > 1 else ""
        raise BadInput(
            f"rollout.quantization: expected a model whose linear layers have multiples of {BLOCK} inputs for "
            f"Fp8PerBlock, found {', '.join(uneven)}{of_each}; write Fp8PerChannel"
        )


QUANTIZATION = {
    "Disabled": None,
    "Fp8PerTensor": "fp8_per_tensor",
    "Fp8PerChannel": "fp8_per_channel",
    "Fp8PerBlock": "fp8_per_block",
}
"""vLLM's names of `rollout.quantization`."""

KV_CACHE_DTYPE = {"Auto": "auto", "Fp8": "fp8"}
"""vLLM's names of `rollout.kvCacheDtype`."""

_CAPABILITY = (8, 9)
"""First GPUs with matrix products of 8-bit floating point."""


@dataclass(frozen=True, slots=True)
class EightBits:
    """A setting of the job that requests 8 bits."""

    field: str
    """quantization or kvCacheDtype."""
    value: str
    default: str
    argument: str
    """The setting as an engine argument of vLLM."""
    vllm_value: str


def requested_eight_bits(spec: RLJobSpec) -> Iterator[EightBits]:
    rollout = spec.rollout
    if (quantization := QUANTIZATION[rollout.quantization]) is not None:
        yield EightBits("quantization", rollout.quantization, "Disabled", "quantization", quantization)
    if rollout.kv_cache_dtype != "Auto":
        value = KV_CACHE_DTYPE[rollout.kv_cache_dtype]
        yield EightBits("kvCacheDtype", rollout.kv_cache_dtype, "Auto", "kv_cache_dtype", value)


def forms_not_installed(spec: RLJobSpec) -> Mapping[str, str]:
    """Message by field for settings that the installed vLLM does not have."""
    found = {}
    for setting in requested_eight_bits(spec):
        values = installed_values(setting.argument)
        if values is not None and setting.vllm_value not in values:
            found[setting.field] = (
                f"expected a form that the installed vLLM supports, found {setting.value} ({setting.argument}="
                f"{setting.vllm_value}); write {setting.default}, or install the vLLM of RLJob's requirements"
            )
    return found


def require_forms_installed(spec: RLJobSpec) -> None:
    """Raise `BadInput` if the job requests 8 bits in a form that the installed vLLM does not have."""
    if problems := forms_not_installed(spec):
        raise BadInput("; ".join(f"rollout.{field}: {message}" for field, message in problems.items()))


def require_eight_bits(spec: RLJobSpec, device: Device, capability: tuple[int, int] | None) -> None:
    """Raise `BadInput` if the engine or its GPU cannot compute in 8 bits, as the job requests.

    `capability`: CUDA compute capability of the engine's GPUs; None if it is not known, which is accepted.
    """
    for field, message in unsupported_eight_bits(spec, device, capability).items():
        raise BadInput(f"rollout.{field}: {message}")


def unsupported_eight_bits(spec: RLJobSpec, device: Device, capability: tuple[int, int] | None) -> Mapping[str, str]:
    """Message by field for settings that the engine on this device cannot have."""
    found = {}
    for setting in requested_eight_bits(spec):
        if device == "cpu":
            found[setting.field] = (
                f"expected {setting.default}, because vLLM on the CPU has no 8-bit floating point, "
                f"found {setting.value}; write {setting.default}, or train on a GPU"
            )
        elif capability is not None and capability < _CAPABILITY:
            found[setting.field] = (
                f"expected {setting.default} on a GPU of compute capability {capability[0]}.{capability[1]}, "
                f"found {setting.value}, which needs 8.9 or newer (Ada, Hopper); write {setting.default}, or use "
                "another GPU"
            )
    return found
