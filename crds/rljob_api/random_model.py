"""The URI `random://qwen3?hidden=64&layers=2&…`: a small architecture with random weights, for tests and benchmarks."""

from __future__ import annotations

from typing import Literal
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*=?:.,"
VOCABULARY_SIZE = len(SPECIAL_TOKENS) + len(CHARACTERS)
"""Of the tokenizer; the model's vocabulary may be larger."""


class RandomModel(BaseModel):
    """The query of a `random://` URI. Names and meanings follow the Hugging Face configuration; sizes are counts."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, allow_inf_nan=False)

    architecture: Literal["qwen3", "llama"]
    hidden: int = Field(64, ge=1)
    intermediate: int | None = Field(None, ge=1, description="default: four times hidden")
    layers: int = Field(2, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(2, ge=1)
    head_dim: int = Field(32, ge=2, multiple_of=2)
    vocabulary: int = Field(64, ge=VOCABULARY_SIZE)
    max_positions: int = Field(4096, ge=1)
    tied: bool = False
    initializer_range: float = Field(0.02, gt=0)
    seed: int = Field(0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _heads_are_shared_evenly(self) -> RandomModel:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kvHeads ({self.kv_heads})")
        return self

    @property
    def intermediate_size(self) -> int:
        return self.intermediate or 4 * self.hidden

    @classmethod
    def of_location(cls, location: str) -> RandomModel:
        """`qwen3?hidden=64&tied=true`, the URI without its scheme. Raises pydantic's `ValidationError`."""
        architecture, _, query = location.partition("?")
        return cls.model_validate({**dict(parse_qsl(query, keep_blank_values=True)), "architecture": architecture})
