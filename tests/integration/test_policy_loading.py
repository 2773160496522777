"""Weights of a model directory in the policy: ranks read the rows of their own shards, as transformers loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rljob_client.errors import BadInput
from rljob_memory.budget.host import READING_BYTES
from rljob_testing.policy_models import read_policy_model
from rljob_testing.supported_models import KINDS
from rljob_trainer.models.checkpoint import load_tokenizer
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy import weight_loading
from rljob_trainer.policy.gradients import local
from rljob_trainer.policy.model import build_policy_model, sent_name, to_compute_dtype
from rljob_trainer.policy.optimizer_state import joined
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.policy.weight_loading import load_weights, read_frozen_weights
from tests.integration.policy_processes import policy_config, policy_processes

UNEVEN: dict[str, Any] = {
    "vocab_size": 65,
    "hidden_size": 30,
    "num_attention_heads": 2,
    "head_dim": 6,
    "intermediate_size": 7,
}
"""Sizes that 2 and 4 ranks do not divide. 4 ranks get 2, 2, 2 and 1 of 7 rows, and 2, 2, 2 and 0 of 6."""


def model_of(directory: Path, model_type: str, *, files: str = "1GB", dtype: torch.dtype, **changes: Any) -> Path:
    """A tiny model of the type, in `dtype`, in files of at most `files`."""
    directory.mkdir()
    [kind] = [each for each in KINDS if each.model_type == model_type]
    model = AutoModelForCausalLM.from_config(kind.config(**changes), dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    model.to(dtype).save_pretrained(directory, max_shard_size=files)
    return directory


@pytest.mark.parametrize(
    ("ranks", "kind", "tied", "dtype"),
    [(1, "qwen3", False, torch.bfloat16), (2, "llama", True, torch.bfloat16), (4, "qwen3", True, torch.float32)],
    ids=["one-rank", "two-ranks-bfloat16-files", "four-ranks-empty-shards"],
)
def test_each_rank_has_its_rows_of_the_whole_model(
    tmp_path: Path, ranks: int, kind: str, tied: bool, dtype: torch.dtype
) -> None:
    model_dir = model_of(tmp_path / "model", kind, files="8KB", dtype=dtype, tie_word_embeddings=tied, **UNEVEN)
    assert (model_dir / "model.safetensors.index.json").is_file()
    config = policy_config(model_dir, tmp_path / "run", kl_coefficient=0.1)
    with policy_processes(ranks, config) as policy:
        shards = policy.run(_local_shards)
    whole = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = {name: parameter.detach().numpy() for name, parameter in whole.named_parameters()}
    for model in ("policy", "reference"):
        assert shards[0][model].keys() == expected.keys()
        for name, values in expected.items():
            parts = [of_rank[model][name] for of_rank in shards]
            assert [len(part) for part in parts] == [len(part) for part in _chunks(values, ranks)], name
            assert np.array_equal(np.concatenate(parts), values), name


def _local_shards(policy: PolicyRank) -> dict[str, dict[str, np.ndarray]]:
    assert policy._loaded.reference is not None
    return {
        key: {sent_name(name): local(parameter).numpy() for name, parameter in model.named_parameters()}
        for key, model in {"policy": policy._model, "reference": policy._loaded.reference}.items()
    }


def _chunks(values: np.ndarray, ranks: int) -> list[np.ndarray]:
    found = [part.numpy() for part in torch.from_numpy(values).chunk(ranks)]
    return found + [values[:0]] * (ranks - len(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen2", "gemma", "phi3", "gemma3_text"])
def test_weights_and_buffers_are_those_that_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    model_dir = model_of(tmp_path / "model", kind, dtype=torch.float32)
    read: list[Tensor] = []
    rows_of = weight_loading.rows_of

    def recorded(file: Path, weight: str, first: int, stop: int) -> Tensor:
        read.append(rows_of(file, weight, first, stop))
        return read[-1]

    monkeypatch.setattr(weight_loading, "rows_of", recorded)
    monkeypatch.setattr(weight_loading, "PIECE_ELEMENTS", 700)
    loaded = read_policy_model(model_dir, temperature=1.0, chunk_tokens=64, dtype=dtype).causal_lm
    expected = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    assert 128 < max(piece.numel() for piece in read) <= 700, "no tensor is read as a whole, unless it is small"
    for pairs in (
        (loaded.named_parameters(), expected.named_parameters()),
        (loaded.named_buffers(), expected.named_buffers()),
    ):
        own, other = map(dict, pairs)
        assert list(own) == list(other)
        for name, values in other.items():
            assert (own[name].dtype, own[name].requires_grad) == (values.dtype, values.requires_grad), name
            assert torch.equal(own[name], values), name


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_frozen_weights_are_read_again_as_they_were_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype
) -> None:
    """Frozen weights are read from files in the model's dtype, or cast as in loading; trained weights do not change."""
    model_dir = model_of(tmp_path / "model", "llama", files="8KB", dtype=stored, tie_word_embeddings=True, **UNEVEN)
    monkeypatch.setattr(weight_loading, "PIECE_ELEMENTS", 700)
    model = read_policy_model(model_dir, temperature=1.0, chunk_tokens=64, dtype=torch.bfloat16)
    trained = model.causal_lm.base_model.norm.weight
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.requires_grad_(False)
    trained.requires_grad_(True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    read_frozen_weights([model], model_dir, "cpu", sent_name)
    assert bool((trained == 7.0).all())
    for name, parameter in model.named_parameters():
        assert parameter is trained or torch.equal(parameter, expected[name]), name


def test_a_file_that_was_truncated_later_is_named(tmp_path: Path) -> None:
    model_dir = model_of(tmp_path / "model", "llama", dtype=torch.bfloat16, **UNEVEN)
    model = read_policy_model(model_dir, temperature=1.0, chunk_tokens=64, dtype=torch.bfloat16).requires_grad_(False)
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadInput, match=r"cannot read .*model\.safetensors"):
        read_frozen_weights([model], model_dir, "cpu", sent_name)


def test_rounded_weights_and_their_remainders_give_the_masters(tmp_path: Path) -> None:
    model_dir = model_of(tmp_path / "model", "llama", dtype=torch.float32, tie_word_embeddings=True)
    model = build_policy_model(model_dir, temperature=1.0, chunk_tokens=64)
    remainders = to_compute_dtype(model, torch.bfloat16)
    load_weights(model, model_dir, "cpu", sent_name, remainders)
    expected = dict(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).named_parameters())
    masters = {sent_name(name): joined(each.detach(), remainders[name]) for name, each in model.named_parameters()}
    assert masters.keys() == expected.keys()
    assert all(torch.equal(masters[name], expected[name]) for name in expected)


def test_the_prediction_has_the_pieces_that_are_read_at_once() -> None:
    stored_and_converted = 4 + 4
    assert weight_loading.READERS * weight_loading.PIECE_ELEMENTS * stored_and_converted == READING_BYTES


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    model_dir = model_of(tmp_path / "model", "llama", dtype=dtype, **UNEVEN)
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][-1, -1] = value
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    found = r"NaN or infinity in model\.layers\.0\.mlp\.up_proj\.weight of .*model\.safetensors"
    with pytest.raises(BadInput, match=found):
        read_policy_model(model_dir, temperature=1.0, chunk_tokens=64, dtype=dtype)


def test_a_tied_head_with_other_values_is_refused(tmp_path: Path) -> None:
    model_dir = model_of(tmp_path / "model", "llama", dtype=torch.float32, tie_word_embeddings=True)
    tensors = load_file(model_dir / "model.safetensors")
    for changed in (0.0, 1.0):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += changed
        save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
        if not changed:
            read_policy_model(model_dir, temperature=1.0, chunk_tokens=64)
    with pytest.raises(BadInput, match=r"expected lm_head.weight to equal model.embed_tokens.weight .* found other"):
        build_policy_model(model_dir, temperature=1.0, chunk_tokens=64)


@pytest.mark.parametrize(("architecture", "tied"), [("qwen3", "true"), ("llama", "false")])
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
