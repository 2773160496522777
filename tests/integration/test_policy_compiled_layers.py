"""Layers stay compiled for all kinds of micro-batches. Traced only: on a CPU no kernels are generated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch._logging._internal import set_logs

from rljob_trainer.algorithm.micro_batch import rehearsal
from rljob_trainer.policy.compiled_layers import compilations, compile_layers
from rljob_trainer.policy.config import LoraConfig
from rljob_trainer.policy.lora import add_adapters
from rljob_trainer.policy.model import PolicyModel, checkpoint_activations, read_policy_model
from tests.integration.policy_processes import tiny_model


@pytest.fixture(autouse=True)
def _compiler_as_it_was() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with config.patch(recompile_limit=config.recompile_limit, fail_on_recompile_limit_hit=False):
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
    add_adapters(model.causal_lm, LoraConfig(rank=2, alpha=4, targets=("q_proj", "down_proj")), seed=0)
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
