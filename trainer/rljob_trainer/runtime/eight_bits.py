"""Requirements of an engine that computes in 8 bits: its vLLM, its device, its GPU. Pure but for the installed vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rljob_api.job import RLJobSpec
from rljob_client.errors import BadInput
from rljob_trainer.hardware import Device
from rljob_trainer.rollout.engine_fields import installed_values

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
