"""What `random://` writes is what transformers expects of the architecture, weight for weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rljob_trainer.models.checkpoint import load_tokenizer
from rljob_trainer.models.resolve import resolve_model


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
