"""Compiled layers: they stay compiled, and compiling before the first update changes no result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch._functorch import config as gradient_config
from torch._logging._internal import set_logs
from torch.distributed.tensor import DTensor

from rljob_api.roles import LoraSpec
from rljob_testing.memory_plans import memory_plan
from rljob_testing.policy_models import read_policy_model
from rljob_trainer.algorithm import gradient_sums
from rljob_trainer.algorithm.micro_batch import rehearsal
from rljob_trainer.policy import loading
from rljob_trainer.policy.gradients import Gradients
from rljob_trainer.policy.lora import add_adapters
from rljob_trainer.policy.model import (
    PolicyModel,
    checkpoint_activations,
    compilations,
    compile_layers,
    shard,
)
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.rollout_batch import RolloutBatch
from tests.integration.policy_processes import (
    ALL_TERMS,
    VOCABULARY,
    policy_config,
    policy_processes,
    scored_batch,
    tiny_config,
    tiny_model,
    weights_digest,
    written_checkpoint,
)


@pytest.fixture(autouse=True)
def _compiler_as_it_was() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with (
        config.patch(recompile_limit=config.recompile_limit, fail_on_recompile_limit_hit=False),
        gradient_config.patch(autograd_cache_allow_custom_autograd_functions=False),
    ):
        yield
    set_logs()
    torch._dynamo.reset()


def forward(model: PolicyModel, rows: int, length: int, *, gradient: bool) -> None:
    with torch.set_grad_enabled(gradient):
        tokens = torch.randint(4, 40, (rows, length))
        logprobs, _ = model(tokens, torch.arange(rows * length), tokens.flatten())
        if gradient:
            logprobs.sum().backward()


def test_layers_stay_compiled_for_every_kind_of_micro_batch(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tiny_model(tmp_path_factory.mktemp("model"))
    model, reference = (read_policy_model(directory, temperature=1.0, chunk_tokens=64) for _ in range(2))
    for each in (model, reference):
        compile_layers(each.decoder_layers, backend="eager")
    reference.requires_grad_(False)

    def all_kinds(widths: int) -> None:
        for rows, length in ((4, 24), (5, 30), (1, 40), (1, 2), (3, 2)):
            for gradient in (True, False):
                forward(model, rows, length + widths, gradient=gradient)
            forward(reference, rows, length + widths, gradient=False)

    all_kinds(0)
    checkpoint_activations(model, enabled=True)
    all_kinds(0)
    compiled = compilations()
    assert compiled >= 6
    all_kinds(7)
    assert compilations() == compiled, "another length compiled again"
    assert counters["frames"]["ok"] == counters["frames"]["total"], "a layer ran uncompiled"


def test_a_rehearsal_compiles_what_micro_batches_of_several_rows_need(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = read_policy_model(tiny_model(tmp_path_factory.mktemp("model")), temperature=1.0, chunk_tokens=64)
    compile_layers(model.decoder_layers, backend="eager")
    with model.one_layer_of_each_kind():
        assert len(model.decoder_layers) == 1
        forward(model, *rehearsal(64, packed=False).input_ids.shape, gradient=True)  # 32 is the width
    assert len(model.decoder_layers) == 2
    compiled = compilations()
    assert compiled > 0
    for rows, length in ((4, 24), (5, 31), (16, 90)):
        forward(model, rows, length, gradient=True)
    assert compilations() == compiled


def test_layers_with_adapters_are_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = read_policy_model(tiny_model(tmp_path_factory.mktemp("model")), temperature=1.0, chunk_tokens=64)
    add_adapters(model.causal_lm, LoraSpec(rank=2, alpha=4, targets=["q_proj", "down_proj"]), seed=0)
    compile_layers(model.decoder_layers, backend="eager")
    assert len(model.decoder_layers) == 2
    forward(model, 4, 24, gradient=True)
    assert compilations() == 1, "the first layer was compiled apart from the others"


def test_a_layer_that_cannot_be_compiled_again_is_an_error() -> None:
    layer = torch.nn.Linear(2, 2)
    compile_layers([layer], backend="eager")
    config.recompile_limit = 1
    layer(torch.ones(3, 2))
    with pytest.raises(FailOnRecompileLimitHit), torch.no_grad():
        layer(torch.ones(3, 2))


def test_a_layer_is_loaded_from_the_cache_unless_its_gradient_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_WARM_POOL", "0")
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)).bfloat16()  # no kernel of C++
    gradient_sums.sum_matrices(layer)

    def lookups() -> list[int]:
        torch._dynamo.reset()
        counters.clear()
        layer.__dict__.pop("forward", None)
        compile_layers([layer])
        with Gradients(list(layer.parameters())).added_up():
            layer(torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        return [counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("miss", "hit", "bypass")]

    def applied_twice(ctx: Any, output_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        for _ in range(2):
            output_grad = gradient_sums._linear_backward(output_grad, *ctx.saved_tensors)
        return output_grad, None, None

    assert [lookups(), lookups()] == [[1, 0, 0], [0, 1, 0]]
    monkeypatch.setattr(gradient_sums._Linear, "backward", staticmethod(applied_twice))
    assert lookups() == [1, 0, 0]


ONE_MICRO_BATCH = memory_plan(micro_batch_tokens=400)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {}),
        (2, {**ALL_TERMS, "updates_per_step": 2}),
        (1, {**ALL_TERMS, "updates_per_step": 2, "dtype": "bfloat16"}),
        (2, {**ALL_TERMS, "lora": LoraSpec(rank=4, alpha=8.0, targets=["q_proj", "down_proj"], dropout=0.1)}),
        (2, {**ALL_TERMS, "memory": memory_plan(micro_batch_tokens=40, activation_checkpointing=True)}),
        (1, {"memory": memory_plan(micro_batch_tokens=40, detach_metrics=False)}),
    ],
    ids=["plain", "all-terms", "bfloat16", "lora", "checkpointing", "kept-graphs"],
)
def test_compiling_ahead_changes_nothing(ranks: int, changes: dict[str, Any], tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path / "model", vocabulary=VOCABULARY + 1)  # two ranks have shards of different sizes

    def learnt(name: str, *, ahead: bool) -> list[Any]:
        with policy_processes(
            ranks, policy_config(model_dir, tmp_path / name, compile_ahead=ahead, **changes)
        ) as policy:
            before = policy.run(weights_digest)
            assert policy.run(gradients_held) == [0] * ranks
            results = [policy.call("update", scored_batch(step)) for step in (1, 2)]
            return [before, policy.run(weights_digest), [[each.metrics for each in step] for step in results]]

    assert learnt("ahead", ahead=True) == learnt("plain", ahead=False)


def test_a_checkpoint_loads_after_compiling_ahead(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    with policy_processes(3, config) as policy:
        policy.call("update", scored_batch(1))
        written_checkpoint(policy, tmp_path / "saved")
        policy.call("update", scored_batch(2))
        expected = policy.run(weights_digest)
    with policy_processes(3, replace(config, compile_ahead=True)) as policy:
        assert policy.call("load_checkpoint", tmp_path / "saved") == [None] * 3
        assert policy.run(unsharded_layers, 2) == [0] * 3, "layers that compiling ahead leaves out are sharded"
        assert policy.run(weights_digest) == expected


def test_several_ranks_compile_nothing_in_an_update_after_compiling_ahead(tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path / "model")

    def compilations(name: str, *, ahead: bool) -> float:
        config = policy_config(
            model_dir, tmp_path / name, compile_ahead=ahead, memory=ONE_MICRO_BATCH, updates_per_step=2, **ALL_TERMS
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


def unsharded_layers(policy: PolicyRank, step: int) -> int:
    """Layers whose weights are still gathered after the forward passes of an update."""
    found = 0

    def count(_module: object, _arguments: object, _output: object) -> None:
        nonlocal found
        weights = (next(layer.parameters()) for layer in policy._model.decoder_layers)
        found = sum(not isinstance(each, DTensor) for each in weights)

    hook = policy._model.causal_lm.base_model.norm.register_forward_hook(count)
    policy.update(scored_batch(step))
    hook.remove()
    return found


def trace_layers(_policy: PolicyRank) -> None:
    """In a policy process: compile layers on the CPU, without generating kernels. Padded, since attention over packed
    sequences is compiled only with the GPU's kernel."""

    def compile_and_shard(model: PolicyModel, *arguments: Any) -> None:
        compile_layers(model.decoder_layers, backend="eager")
        shard(model, *arguments)

    loading.shard = compile_and_shard  # type: ignore[assignment, attr-defined]
    loading.can_pack = lambda *_arguments: False  # type: ignore[attr-defined]


def gradients_held(policy: PolicyRank) -> int:
    return len(policy._optimizer.gradients.all())
