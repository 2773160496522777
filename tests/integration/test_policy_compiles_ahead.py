"""Compiling the layers before the first update changes neither its result nor how the ranks hold the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.tensor import DTensor

from rljob_testing.memory_plans import memory_plan
from rljob_trainer.algorithm.loss_config import LossConfig
from rljob_trainer.policy import rank as policy_rank
from rljob_trainer.policy.compiled_layers import compile_layers
from rljob_trainer.policy.config import LoraConfig
from rljob_trainer.policy.model import PolicyModel, shard
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.rollout_batch import RolloutBatch
from tests.integration.policy_processes import (
    ALL_TERMS,
    VOCABULARY,
    complete_checkpoint,
    policy_config,
    policy_processes,
    scored_batch,
    tiny_model,
)

PLAIN = LossConfig()
ONE_MICRO_BATCH = memory_plan(micro_batch_tokens=400)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {"loss": PLAIN},
        {"loss": ALL_TERMS, "updates_per_step": 2},
        {"loss": ALL_TERMS, "updates_per_step": 2, "dtype": "bfloat16"},
        {"loss": ALL_TERMS, "lora": LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"), dropout=0.1)},
        {"loss": ALL_TERMS, "memory": memory_plan(micro_batch_tokens=40, activation_checkpointing=True)},
        {"loss": PLAIN, "memory": memory_plan(micro_batch_tokens=40, detach_metrics=False)},
    ],
    ids=["plain", "all-terms", "bfloat16", "lora", "checkpointing", "kept-graphs"],
)
def test_compiling_ahead_changes_nothing(ranks: int, changes: dict[str, Any], tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path / "model", vocabulary=VOCABULARY + 1)  # two ranks have shards of different sizes

    def learnt(name: str, *, ahead: bool) -> list[Any]:
        with policy_processes(
            ranks, policy_config(model_dir, tmp_path / name, compile_ahead=ahead, **changes)
        ) as policy:
            before = policy.call("weights_digest")
            assert policy.run(gradients_held) == [0] * ranks
            results = [policy.call("update", scored_batch(step)) for step in (1, 2)]
            return [before, policy.call("weights_digest"), [[each.metrics for each in step] for step in results]]

    assert learnt("ahead", ahead=True) == learnt("plain", ahead=False)


def test_layers_that_compiling_ahead_leaves_out_are_sharded(tmp_path: Path) -> None:
    config = policy_config(tiny_model(tmp_path / "model"), tmp_path / "run", compile_ahead=True)
    with policy_processes(2, config) as policy:
        assert policy.run(unsharded_layers) == [0, 0]


def test_a_checkpoint_loads_after_compiling_ahead(tmp_path: Path) -> None:
    config = policy_config(tiny_model(tmp_path / "model"), tmp_path / "run")
    with policy_processes(3, config) as policy:
        policy.call("update", scored_batch(1))
        policy.call("start_checkpoint", tmp_path / "saved")
        complete_checkpoint(policy, tmp_path / "saved")
        policy.call("update", scored_batch(2))
        expected = policy.call("weights_digest")
    with policy_processes(3, replace(config, compile_ahead=True)) as policy:
        assert policy.call("load_checkpoint", tmp_path / "saved") == [None] * 3
        policy.call("update", scored_batch(2))
        assert policy.call("weights_digest") == expected


def test_several_ranks_compile_nothing_in_an_update_after_compiling_ahead(tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path / "model")

    def compilations(name: str, *, ahead: bool) -> float:
        config = policy_config(
            model_dir, tmp_path / name, compile_ahead=ahead, loss=ALL_TERMS, updates_per_step=2, memory=ONE_MICRO_BATCH
        )
        with policy_processes(2, config, load=False) as policy:
            policy.run(trace_layers)
            policy.call("load")
            return float(policy.call("update", several_rows(scored_batch(1)))[0].metrics["compilations"])

    assert compilations("plain", ahead=False) > 0
    assert compilations("ahead", ahead=True) == 0


def several_rows(batch: RolloutBatch) -> RolloutBatch:
    """`batch` with completions of equal length: a micro-batch of one row would be compiled apart."""
    return replace(
        batch,
        prompt_ids=[np.full(4, 5, np.int32)] * len(batch.prompt_ids),
        response_ids=[np.full(9, 6, np.int32)] * len(batch),
        rollout_logprobs=[np.full(9, -4.0, np.float32)] * len(batch),
    )


def unsharded_layers(policy: PolicyRank) -> int:
    """Layers whose weights are still gathered after a forward pass."""
    found = 0

    def count(_module: object, _arguments: object, _output: object) -> None:
        nonlocal found
        weights = (next(layer.parameters()) for layer in policy._model.decoder_layers)
        found = sum(not isinstance(each, DTensor) for each in weights)

    hook = policy._model.causal_lm.base_model.norm.register_forward_hook(count)
    policy.update(scored_batch(1))
    hook.remove()
    return found


def trace_layers(_policy: PolicyRank) -> None:
    """In a policy process: compile layers on the CPU, without generating kernels. Padded, since attention over packed
    sequences is compiled only with the GPU's kernel."""

    def compile_and_shard(model: PolicyModel, *arguments: Any) -> None:
        compile_layers(model.decoder_layers, backend="eager")
        shard(model, *arguments)

    policy_rank.shard = compile_and_shard  # type: ignore[assignment, attr-defined]
    policy_rank.can_pack = lambda *_arguments: False  # type: ignore[attr-defined]


def gradients_held(policy: PolicyRank) -> int:
    return len(policy._optimizer.gradients.all())
