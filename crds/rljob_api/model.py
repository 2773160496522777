"""The model and its source."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

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


_IN_A_CLAIM = "^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?$"
_UPWARDS = "/[.][.](/|$)"
_WHITE_SPACE = "[ \\t\\r\\n\\v\\f]"


def _names_a_claim(uri: str) -> bool:
    return bool(re.search(_IN_A_CLAIM, uri)) and not re.search(_UPWARDS, uri)


class ModelSpec(ApiModel):
    """The model to train."""

    uri: ModelUri
    """Source of the model: oci://registry/name:tag (an image volume), hf://org/name (Hugging Face hub),
    pvc://claim/path (a volume), file:///path (a directory; spaces may be written as %20), or
    random://qwen3?hidden=64&layers=2&… (random weights, for tests)."""

    cache: ModelCache | None = None
    """Volume that keeps a downloaded hf:// model for other jobs, and compiled code if requested. Absent: both are kept
    on the checkpoints' volume, for the pods and attempts of this job. A complete model in it is used without contacting
    the hub. rljob run ignores it: HF_HOME applies."""

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
            f"self.uri.matches('{_IN_A_CLAIM}') && !self.uri.matches('{_UPWARDS}')",
            holds=lambda model: not model.uri.startswith("pvc://") or _names_a_claim(model.uri),
            field="uri",
            message="must be pvc://claim/path, with the name of a claim and a path without ..: write "
            "pvc://models/qwen3, for example",
        ),
    )
