"""Kinds of models that cannot be trained, from their configuration and the names of their weights. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob_client.errors import BadInput
from rljob_client.model_files import read_config, weight_shapes
from rljob_trainer.models.checkpoint import ADVICE
from rljob_trainer.models.consistency import require_complete_weights, require_known_kind, require_same_reading

_SCALED_HEAD_SETTINGS = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
)
"""Settings of `config.json` that cap or scale the logits, unless they are 1 or null."""

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Settings of `config.json` with the number of experts of a layer. Dense models of the same kinds have 0 there."""

_KINDS_WITH_BIASED_HEAD = frozenset({"phi"})
"""Kinds (`model_type`) whose output layer always has a bias, which their configuration does not show."""


def require_trainable(directory: Path) -> None:
    """Raise `BadInput`, with the kind of the model in `directory`, if it cannot be trained."""
    require_trainable_settings(directory)
    kind, shapes = _kind(read_config(directory)), weight_shapes(directory)
    if experts := next((name for name in shapes if ".experts." in name), None):
        raise _mixture_of_experts(directory, kind, experts)
    if "lm_head.bias" in shapes:
        raise _biased_head(directory, kind)
    require_complete_weights(directory)


def require_trainable_settings(directory: Path) -> None:
    """Raise `BadInput` if `config.json` alone shows that the model cannot be trained. Its weights may be missing."""
    config = read_config(directory)
    kind = _kind(config)
    if scaled := scaled_head_settings(config):
        raise BadInput(
            f"expected a model whose logits are neither scaled nor capped in {directory}, found {kind} with "
            f"{', '.join(scaled)} in config.json; {ADVICE}"
        )
    for name in _EXPERT_COUNTS:
        count = config.get(name)
        if isinstance(count, int) and count > 1:
            raise _mixture_of_experts(directory, kind, f"{name}: {count} in config.json")
    if kind in _KINDS_WITH_BIASED_HEAD:
        raise _biased_head(directory, kind)
    require_known_kind(directory)
    require_same_reading(directory)


def scaled_head_settings(config: Mapping[str, Any]) -> list[str]:
    """The settings of `config` that cap or scale the logits, as `name: value`."""
    given = ((name, config.get(name)) for name in _SCALED_HEAD_SETTINGS)
    return [f"{name}: {value}" for name, value in given if value not in (None, 1.0)]


def _kind(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type") or config["architectures"][0])


def _mixture_of_experts(directory: Path, kind: str, evidence: str) -> BadInput:
    return BadInput(
        f"expected a dense model in {directory}, found a mixture of experts of the kind {kind} ({evidence}); {ADVICE}"
    )


def _biased_head(directory: Path, kind: str) -> BadInput:
    return BadInput(
        f"expected logits = hidden · lm_head.weight in {directory}, found {kind}, which adds lm_head.bias; {ADVICE}"
    )
