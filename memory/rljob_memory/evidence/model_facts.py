"""The size of the model in a log: parameters, type, vocabulary, tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rljob_memory.evidence.signatures import pattern

_BYTES = {"float32": 4, "fp32": 4}
_HALF = 2
_FACTORS = {"k": 1e3, "m": 1e6, "million": 1e6, "b": 1e9, "billion": 1e9, "t": 1e12}
_LEAST, _MOST = 1_000_000, 3_000_000_000_000
_BATCH = ("per_device_train_batch_size", "ppo_micro_batch_size_per_gpu")
_LENGTH = ("max_length", "max_seq_length", "max_model_len")
_TOKENS = ("ppo_max_token_len_per_gpu", "max_tokens_per_mb", "max_token_len_per_gpu")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """None if the log does not show it."""

    parameters: int | None = None

    trained_parameters: int | None = None
    """Fewer than `parameters` with adapters."""

    parameter_bytes: int | None = None
    """Bytes of one parameter."""

    vocabulary: int | None = None

    micro_batch_tokens: int | None = None
    """Most tokens of one pass through the policy."""

    parameters_of_name: int | None = None
    """Parameters according to the model's name, such as `Qwen2.5-7B`: a last resort."""


def noted(model: ModelFacts, text: str) -> ModelFacts:
    """`model` with the facts in a line. The first ones count: they are the policy's, before the critic's."""
    if "aram" in text:
        if model.trained_parameters is None and (match := pattern("trained_parameters").search(text)):
            model = replace(model, trained_parameters=_count(match["count"], match["unit"]))
        if model.parameters is None and (match := pattern("parameters").search(text)):
            count = _count(match["count"] or match["has"], match["unit"] or match["has_unit"])
            model = replace(model, parameters=count)
    if model.vocabulary is None and "vocab_size" in text and (match := pattern("vocabulary").search(text)):
        model = replace(model, vocabulary=int(match[1]))
    if model.parameter_bytes is None and "dtype" in text and (match := pattern("dtype").search(text)):
        model = replace(model, parameter_bytes=_BYTES.get(match[1], _HALF))
    if (
        model.parameters_of_name is None
        and ("B" in text or "b" in text)
        and (match := pattern("size_in_name").search(text))
    ):
        model = replace(model, parameters_of_name=round(float(match[1]) * 1e9))
    return model


def micro_batch_tokens(options: Mapping[str, str]) -> int | None:
    """Tokens of one pass by the options' values: a budget of tokens, or the micro-batch times the longest sequence."""
    values = {name: int(value) for name, value in options.items() if value.isdigit()}
    if budget := next((values[name] for name in _TOKENS if name in values), None):
        return budget
    batch = next((values[name] for name in _BATCH if name in values), None)
    length = next((values[name] for name in _LENGTH if name in values), None)
    return batch * length if batch and length else None


def _count(number: str, unit: str | None) -> int | None:
    count = round(float(number.replace(",", "")) * _FACTORS.get((unit or "").lower(), 1))
    return count if _LEAST <= count <= _MOST else None
