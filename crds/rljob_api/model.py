"""The model and its source."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from rljob_api.api_model import ApiModel, Rule, Text
from rljob_api.mounted_files import ModelCache

Dtype = Literal["Auto", "bfloat16", "float32"]

ModelUri = Annotated[
    str,
    Text(
        pattern=r"^(oci|hf|pvc|file|random)://.+$",
        expected="a URI that begins with oci://, hf://, pvc://, file:// or random://, such as hf://org/name",
        max_length=1024,
    ),
]


_CLAIM_URI = "^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?$"
_PARENT_DIRECTORY = "/[.][.](/|$)"
_WHITE_SPACE = "[ \\t\\r\\n\\v\\f]"


def _is_claim_uri(uri: str) -> bool:
    return bool(re.search(_CLAIM_URI, uri)) and not re.search(_PARENT_DIRECTORY, uri)


class ModelSpec(ApiModel):
    """The model to train."""

    uri: ModelUri
    """Source of the model: oci://registry/name:tag (an image volume), hf://org/name (Hugging Face hub),
    pvc://claim/path (a volume), file:///path (a directory; spaces may be written as %20), or
    random://qwen3?hidden=64&layers=2&… (random weights, for tests)."""

    cache: ModelCache | None = None
    """Volume that keeps a downloaded hf:// model and data set for other jobs, and compiled code if requested. Absent:
    they are kept on the checkpoints' volume, for the pods and attempts of this job. A complete model in it is used
    without contacting the hub. rljob run ignores it: HF_HOME applies."""

    dtype: Dtype = "Auto"
    """Data type of the weights in the forward pass and in the engine. Auto: bfloat16 on a GPU, float32 on a CPU. The
    policy always keeps float32 master weights, except for weights that policy.lora freezes."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.uri.startsWith('file://') || !self.uri.matches('{_WHITE_SPACE}')",
            holds=lambda model: model.uri.startswith("file://") or not re.search(_WHITE_SPACE, model.uri),
            field="uri",
            message="must not contain white space, which only the path after file:// may: remove it",
        ),
        Rule(
            cel="!self.uri.startsWith('pvc://') || "
            f"self.uri.matches('{_CLAIM_URI}') && !self.uri.matches('{_PARENT_DIRECTORY}')",
            holds=lambda model: not model.uri.startswith("pvc://") or _is_claim_uri(model.uri),
            field="uri",
            message="must be pvc://claim/path, with the name of a claim and a path without ..: write "
            "pvc://models/qwen3, for example",
        ),
    )


SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*=?:.,"
VOCABULARY_SIZE = len(SPECIAL_TOKENS) + len(CHARACTERS)
"""Size of the tokenizer's vocabulary; the model's may be larger."""


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
