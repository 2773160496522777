"""Low-rank adapters (LoRA): train small matrices beside frozen weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.api_model import ApiModel, Text, immutable

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
