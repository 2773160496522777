"""Options of verl that its adapter changes, without hydra. tests/integration/test_adapters.py has verl's own files."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_probe.adapters import verl
from rljob_probe.adapters.changes import changes_of

ACTOR = "actor_rollout_ref.actor"


class FlatConf:
    """The calls of OmegaConf that the adapter makes, on a dict of dotted names."""

    @staticmethod
    def select(config: dict[str, Any], name: str) -> Any:
        section = {key[len(name) + 1 :]: value for key, value in config.items() if key.startswith(f"{name}.")}
        return config.get(name, section or None)

    @staticmethod
    def update(config: dict[str, Any], name: str, value: Any) -> None:
        config[name] = value

    @staticmethod
    def is_interpolation(section: Any, key: str) -> bool:
        return False


def adapted(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The options that differ afterwards."""
    monkeypatch.setitem(sys.modules, "omegaconf", SimpleNamespace(OmegaConf=FlatConf))
    before = dict(config)
    verl.adapt(config, changes_of(json.dumps(changes)))
    return {name: value for name, value in config.items() if value != before[name]}


@pytest.mark.parametrize(
    ("strategy", "section"),
    [
        ("fsdp", "fsdp_config"),
        ("fsdp2", "fsdp_config"),
        ("megatron", "megatron"),
        ("veomni", "veomni"),
        ("torchtitan", "torchtitan"),
    ],
)
def test_the_optimizer_is_offloaded_by_the_engine_in_use(
    monkeypatch: pytest.MonkeyPatch, strategy: str, section: str
) -> None:
    option = f"{ACTOR}.{section}.optimizer_offload"
    config = {f"{ACTOR}.strategy": strategy, option: False}
    assert adapted(monkeypatch, {"optimizerOffload": True}, config) == {option: True}


@pytest.mark.parametrize(
    ("option", "gpus", "after"),
    [
        ("ulysses_sequence_parallel_size", 1, 32_768),
        ("ulysses_sequence_parallel_size", 4, 8_192),
        ("fsdp_config.ulysses_sequence_parallel_size", 2, 16_384),
        ("veomni.ulysses_parallel_size", 4, 8_192),
        ("megatron.context_parallel_size", 8, 4_096),
    ],
)
def test_gpus_that_share_a_sequence_hold_it_together(
    monkeypatch: pytest.MonkeyPatch, option: str, gpus: int, after: int
) -> None:
    budget = f"{ACTOR}.ppo_max_token_len_per_gpu"
    config = {
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.{option}": gpus,
        budget: 40_000,
        "data.max_prompt_length": 1_024,
        "data.max_response_length": 31_744,
    }
    assert adapted(monkeypatch, {"microBatchTokens": 0.01}, config) == {budget: after}


@pytest.mark.parametrize(("share", "after"), [(0.5, 16), (0.25, 8), (0.01, 8)])
def test_a_micro_batch_of_all_gpus_leaves_each_of_them_a_sequence(
    monkeypatch: pytest.MonkeyPatch, share: float, after: int
) -> None:
    option = f"{ACTOR}.ppo_micro_batch_size"
    config = {option: 32, "trainer.nnodes": 2, "trainer.n_gpus_per_node": 4}
    assert adapted(monkeypatch, {"microBatchTokens": share}, config) == {option: after}
