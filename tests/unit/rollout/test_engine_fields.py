"""Engine arguments are compared with vLLM's own before vLLM is imported."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_client.errors import BadInput
from rljob_trainer.rollout.config import SET_BY_TRAINER
from rljob_trainer.rollout.engine_fields import (
    engine_args_problems,
    fields_in,
    installed_engine_fields,
    installed_values,
    literal_in,
    require_engine_args,
)
from rljob_trainer.runtime.eight_bits import KV_CACHE_DTYPE, QUANTIZATION

SOURCE = """
import torch

@dataclass
class EngineArgs:
    enforce_eager: bool = False
    block_size: int | None = None
    swap_space: float = 4
    served_model_name: str | list[str] | None = None
    attention_backend: Backends | str | None = None
    scheduler: SchedulerOption = "auto"
    mode: Literal["fast", "exact"] | None = None
    overrides: 'dict[str, Any] | Overrides' = None

    def method(self) -> int:
        local: int = 3
        return local
"""
FIELDS = fields_in(SOURCE)


def test_the_fields_are_those_of_the_class() -> None:
    assert list(FIELDS) == [
        *("enforce_eager", "block_size", "swap_space", "served_model_name"),
        *("attention_backend", "scheduler", "mode", "overrides"),
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enforce_eager", True),
        ("block_size", 16),
        ("block_size", None),
        ("swap_space", 4),
        ("served_model_name", ["a", "b"]),
        ("attention_backend", "fast"),
        ("scheduler", "anything of a type that only vLLM knows"),
        ("mode", "fast"),
        ("overrides", {"a": 1}),
    ],
)
def test_values_of_the_right_type_are_accepted(name: str, value: Any) -> None:
    assert engine_args_problems({name: value}, FIELDS) == {}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("enforce_eager", "yes", "expected bool, found 'yes'"),
        ("block_size", "16", "expected int | None, found '16'"),
        ("block_size", True, "expected int | None, found True"),
        ("swap_space", "4GB", "expected float, found '4GB'"),
        ("mode", "slow", "expected Literal['fast', 'exact'] | None, found 'slow'"),
        ("enforce_eagerly", True, "is not an engine argument of the installed vLLM: did you mean enforce_eager?"),
        ("zzz", True, "is not an engine argument of the installed vLLM: remove it"),
        ("dtype", "half", "expected no such argument: the trainer sets it itself; remove it"),
        (
            "hf_overrides",
            {"rope_theta": 1.0},
            "expected no such argument: only the engine would follow it, not the policy; change the files of the model "
            "instead, and remove it",
        ),
    ],
)
def test_unknown_or_refused_names_and_wrong_types_are_found(name: str, value: Any, message: str) -> None:
    assert engine_args_problems({name: value}, FIELDS) == {name: message}


def test_the_values_are_those_of_the_literal() -> None:
    source = (
        'from typing import Literal\nOther = Literal["a"]\nNames = Literal[\n    "b",\n    # a comment\n    "c",\n]\n'
    )
    assert literal_in(source, "Names") == ["b", "c"]
    assert literal_in(source, "Absent") == []


def test_the_installed_vllm_has_every_form_of_8_bits() -> None:
    for argument, names in (("quantization", QUANTIZATION), ("kv_cache_dtype", KV_CACHE_DTYPE)):
        values = installed_values(argument)
        assert values is not None, "the tests' environment has vLLM"
        assert {name for name in names.values() if name is not None} <= set(values)


def test_the_installed_vllm_is_read() -> None:
    fields = installed_engine_fields()
    assert fields is not None, "the tests' environment has vLLM"
    assert {"enforce_eager", "max_num_seqs", "weight_transfer_config"} <= fields.keys()
    assert fields.keys() >= SET_BY_TRAINER
    require_engine_args({"enforce_eager": True, "max_num_batched_tokens": 2048})
    with pytest.raises(BadInput, match=r"rollout\.engineArgs\.enforce_eagerly: .* did you mean enforce_eager\?"):
        require_engine_args({"enforce_eagerly": True})
