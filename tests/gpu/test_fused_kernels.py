"""A kernel compiled for one micro-batch length serves all lengths."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from rljob_testing.policy_models import read_policy_model
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy.model import compile_layers

pytestmark = pytest.mark.gpu
SMALL_TO_LARGE_TOKENS = (90, 1_000, 4_100, 9_000, 16_380)  # none is a dimension of the layer
MODEL = "random://qwen3?hidden=1024&intermediate=3072&layers=2&heads=16&kvHeads=8&headDim=128&vocabulary=1024&tied=true"


@pytest.mark.parametrize("lengths", [SMALL_TO_LARGE_TOKENS, SMALL_TO_LARGE_TOKENS[::-1]], ids=["grows", "shrinks"])
def test_a_micro_batch_of_another_length_compiles_no_layer(lengths: tuple[int, ...]) -> None:
    torch.compiler.reset()
    counters.clear()
    model = read_policy_model(resolve_model(MODEL), temperature=1.0, chunk_tokens=256).to("cuda", torch.bfloat16)
    compile_layers(model.decoder_layers)
    for tokens in lengths:
        hidden = torch.randn(1, tokens, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        positions = torch.arange(tokens, device="cuda")[None]
        rotary = model.causal_lm.model.rotary_emb(hidden, positions)
        for layer in model.decoder_layers:
            layer(hidden, position_embeddings=rotary).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
