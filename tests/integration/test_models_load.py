"""`random://` writes the weights that transformers expects of the architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rljob_client.errors import BadInput
from rljob_trainer.models.checkpoint import load_tokenizer
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy.model import read_policy_model


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_transformers_loads_every_weight_and_no_other(tmp_path: Path, architecture: str, tied: str) -> None:
    directory = resolve_model(f"random://{architecture}?tied={tied}", tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (tied == "true")
    logits = model(torch.tensor([[11, 46]])).logits
    assert logits.shape == (1, 2, 64)
    assert torch.isfinite(logits).all()


def test_auto_tokenizer_and_the_torch_free_one_agree(tmp_path: Path) -> None:
    directory = resolve_model("random://qwen3", tmp_path)
    text = "3 + 4 = 7, x"
    assert AutoTokenizer.from_pretrained(directory)(text).input_ids == load_tokenizer(directory)(text).input_ids


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_the_policy_has_the_weights_of_the_checkpoint(tmp_path: Path, architecture: str, tied: str) -> None:
    directory = resolve_model(f"random://{architecture}?tied={tied}", tmp_path)
    read_policy_model(directory, temperature=1.0, chunk_tokens=64)


def test_experts_that_transformers_fuses_are_refused(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=r"to keep names and shapes .* in qwen3_moe"):
        read_policy_model(tmp_path, temperature=1.0, chunk_tokens=64)
