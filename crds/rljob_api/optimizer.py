"""The optimizer of the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rljob_api.api_model import ApiModel, immutable


class OptimizerSpec(ApiModel):
    """The optimizer of the policy: AdamW with float32 master weights. Its learning rate, betas and weight decay are
    under `algorithm`."""

    moments: Literal["float32", "bfloat16", "int8"] = Field(default="float32", json_schema_extra=immutable())
    """Data type of AdamW's two moments. bfloat16 halves their memory and the time to stream them, int8 quarters both.
    bfloat16 moments are rounded stochastically. int8 moments are quantized in blocks of 256, each with a float32 scale;
    updates differ from those with float32 by a few percent."""
