"""The shape of a model, also from its URI alone: exact for random weights and well-known models. Pure.

Other models have a typical shape of the size in their name. Host memory and disk depend on little more than the number
of parameters, so that is close enough.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from pydantic import ValidationError

from rljob_api.job import RLJobSpec
from rljob_api.model import RandomModel
from rljob_memory.hardware import DeviceKind

_SIZE = re.compile(r"(?:^|[-_/. ])(\d{1,4}(?:\.\d{1,3})?)([BbMm])(?=$|[-_/.:@ ])")
_UNITS = {"b": 10**9, "m": 10**6}
_VOCABULARY = 151_936
_LARGEST_SIZE = 10**7
"""Maximum of a hidden size and of a number of layers: a larger one is a mistake."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer."""

    parameters: int
    """All parameters; tied ones count once."""
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    bytes_per_parameter: int
    """In the forward pass and in the engine: 2 for bfloat16, 4 for float32."""
    heads: int = 0
    """Attention heads; 0: unknown."""
    intermediate: int = 0
    """Size of the gated MLP; 0: unknown."""
    adapter_parameters: int = 0
    """Parameters of low-rank adapters, which are trained instead of `parameters`. 0: there are none."""

    @property
    def trained_parameters(self) -> int:
        """Parameters with float32 values, gradients and optimizer state."""
        return self.adapter_parameters or self.parameters

    @property
    def frozen_bytes(self) -> int:
        """Weights that are not trained: all, in the forward pass's dtype, if there are adapters."""
        return self.weight_bytes if self.adapter_parameters else 0

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.bytes_per_parameter

    @property
    def largest_parameter_bytes(self) -> int:
        """The embedding, or the output projection of the same shape."""
        return self.vocabulary * self.hidden * self.bytes_per_parameter

    @property
    def attention_width(self) -> int:
        """Numbers in the queries of one token."""
        return self.heads * self.head_dim or self.hidden


def shape_in_uri(spec: RLJobSpec, bytes_per_parameter: int, *, exact: bool = False) -> ModelShape | None:
    """The shape; None if neither the URI nor the name in it has a size.

    `bytes_per_parameter`: in the forward pass. `exact`: None for a model that is not known, whatever size it names.
    """
    scheme, _, location = spec.model.uri.partition("://")
    shape = _random_shape(location, bytes_per_parameter) if scheme == "random" else None
    if scheme != "random":
        shape = (_known_shape if exact else shape_of_name)(location, bytes_per_parameter)
    if shape is None or spec.policy.lora is None:
        return shape
    return with_adapters(shape, spec.policy.lora.rank)


def compute_bytes(spec: RLJobSpec, device: DeviceKind) -> int:
    """Bytes per parameter in the forward pass and in the engine."""
    auto = "bfloat16" if device == "cuda" else "float32"
    return 2 if (auto if spec.model.dtype == "Auto" else spec.model.dtype) == "bfloat16" else 4


_KNOWN = {
    "qwen2.5-0.5b": (494_032_768, 24, 896, 2, 64, 151_936, 14, 4864),
    "qwen2.5-1.5b": (1_543_714_304, 28, 1536, 2, 128, 151_936, 12, 8960),
    "qwen2.5-3b": (3_085_938_688, 36, 2048, 2, 128, 151_936, 16, 11_008),
    "qwen2.5-7b": (7_615_616_512, 28, 3584, 4, 128, 152_064, 28, 18_944),
    "qwen2.5-14b": (14_770_033_664, 48, 5120, 8, 128, 152_064, 40, 13_824),
    "qwen2.5-32b": (32_763_876_352, 64, 5120, 8, 128, 152_064, 40, 27_648),
    "qwen3-0.6b": (596_049_920, 28, 1024, 8, 128, 151_936, 16, 3072),
    "qwen3-1.7b": (1_720_574_976, 28, 2048, 8, 128, 151_936, 16, 6144),
    "qwen3-4b": (4_022_468_096, 36, 2560, 8, 128, 151_936, 32, 9728),
    "qwen3-8b": (8_190_735_360, 36, 4096, 8, 128, 151_936, 32, 12_288),
    "qwen3-14b": (14_768_307_200, 40, 5120, 8, 128, 151_936, 40, 17_408),
    "qwen3-32b": (32_762_123_264, 64, 5120, 8, 128, 151_936, 64, 25_600),
    "llama-3.2-1b": (1_235_814_400, 16, 2048, 8, 64, 128_256, 32, 8192),
    "llama-3.2-3b": (3_212_749_824, 28, 3072, 8, 128, 128_256, 24, 8192),
    "llama-3.1-8b": (8_030_261_248, 32, 4096, 8, 128, 128_256, 32, 14_336),
    "llama-3.1-70b": (70_553_706_496, 80, 8192, 8, 128, 128_256, 64, 28_672),
    "llama-3.3-70b": (70_553_706_496, 80, 8192, 8, 128, 128_256, 64, 28_672),
    "mistral-7b": (7_248_023_552, 32, 4096, 8, 128, 32_768, 32, 14_336),
    "smollm2-135m": (134_515_008, 30, 576, 3, 64, 49_152, 9, 1536),
    "smollm2-1.7b": (1_711_376_384, 24, 2048, 32, 64, 49_152, 32, 8192),
}
"""Parameters, layers, hidden size, KV heads, head dimension, vocabulary, heads and MLP of public models, from their
config.json, by the part of the name that their variants share."""


def shape_of_name(name: str, bytes_per_parameter: int) -> ModelShape | None:
    """The shape of a public model, or a typical one of the size in the name; None if it has none."""
    known, parameters = _known_shape(name, bytes_per_parameter), parameters_in_name(name)
    return known or (typical_shape(parameters, bytes_per_parameter) if parameters else None)


def _known_shape(name: str, bytes_per_parameter: int) -> ModelShape | None:
    last = name.partition("@")[0].rsplit("/", 1)[-1].lower()
    for known, (parameters, layers, hidden, kv_heads, head_dim, vocabulary, heads, intermediate) in _KNOWN.items():
        if re.search(rf"(?:^|[-_]){re.escape(known)}(?:$|[-_.:])", last):
            return ModelShape(
                parameters,
                layers,
                hidden,
                kv_heads,
                head_dim,
                vocabulary,
                bytes_per_parameter,
                heads=heads,
                intermediate=intermediate,
            )
    return None


def parameters_in_name(name: str) -> int | None:
    """Parameters by the largest size in a name: `Qwen2.5-0.5B-Instruct` → 500,000,000. None if it has none.

    Other sizes count something else: `30B-A3B` the active parameters, `7B-Instruct-1M` the tokens of the context.
    """
    sizes = (int(float(number) * _UNITS[unit.lower()]) for number, unit in _SIZE.findall(name))
    return max(sizes, default=0) or None


def typical_shape(parameters: int, bytes_per_parameter: int) -> ModelShape:
    """A dense transformer of this size, with 12 × hidden² parameters in each of hidden ÷ 128 layers."""
    hidden = max(int((parameters * 128 / 12) ** (1 / 3)) // 128, 1) * 128
    return ModelShape(
        parameters=parameters,
        layers=max(hidden // 128, 1),
        hidden=hidden,
        kv_heads=min(8, hidden // 128),
        head_dim=128,
        vocabulary=_VOCABULARY,
        bytes_per_parameter=bytes_per_parameter,
        heads=hidden // 128,
        intermediate=3 * hidden,
    )


def dense_parameters(shape: ModelShape, *, tied: bool) -> int:
    """Parameters of a Llama of this shape. `tied`: the output layer shares its weight with the embedding."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return shape.layers * layer + (1 if tied else 2) * shape.vocabulary * shape.hidden + shape.hidden


def with_adapters(shape: ModelShape, rank: int) -> ModelShape:
    """`shape` with low-rank adapters on all linear layers: about 2 × rank ÷ hidden of the parameters."""
    return replace(shape, adapter_parameters=2 * rank * shape.parameters // max(shape.hidden, 1))


def _random_shape(location: str, bytes_per_parameter: int) -> ModelShape | None:
    try:
        model = RandomModel.of_location(location)
    except ValidationError:
        return None
    hidden, heads, kv_heads, intermediate = model.hidden, model.heads, model.kv_heads, model.intermediate_size
    sizes = (hidden, model.layers, heads, kv_heads, model.head_dim, model.vocabulary, intermediate)
    if max(sizes) > _LARGEST_SIZE:
        return None
    shape = ModelShape(
        parameters=0,
        layers=model.layers,
        hidden=hidden,
        kv_heads=kv_heads,
        head_dim=model.head_dim,
        vocabulary=model.vocabulary,
        bytes_per_parameter=bytes_per_parameter,
        heads=heads,
        intermediate=intermediate,
    )
    return replace(shape, parameters=dense_parameters(shape, tied=model.tied))
