"""Packed sequences give what each gives alone, in every kind of model that packs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rljob_trainer.policy import flash_attention_4, packed_attention
from rljob_trainer.policy.model import PolicyModel
from rljob_trainer.policy.packed_attention import PACKED_KINDS, can_pack

LENGTHS = [7, 1, 12, 3]
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def model_of(kind: str, attention: str, **changes: Any) -> PolicyModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SHAPE | changes))
    packed_attention.register()
    causal_lm = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return PolicyModel(causal_lm, temperature=1.0, chunk_tokens=64, packs=attention == packed_attention.NAME)


QWEN_WINDOW = {
    "sliding_window": 4,
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention"],
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [*((kind, {}) for kind in sorted(PACKED_KINDS)), ("mistral", {"sliding_window": 4}), ("qwen3", QWEN_WINDOW)],
)
def test_packed_sequences_give_what_each_gives_alone(kind: str, changes: dict[str, Any]) -> None:
    packed, plain = (model_of(kind, attention, **changes) for attention in (packed_attention.NAME, "sdpa"))
    plain.load_state_dict(packed.state_dict())
    ids = torch.randint(1, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    targets, rows = ids.roll(1), torch.arange(len(ids))
    logprobs, entropy = packed(
        ids[None],
        rows,
        targets,
        bounds=torch.tensor(np.cumsum([0, *LENGTHS]), dtype=torch.int32),
        longest=16,
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
    )
    weights = torch.randn(len(ids), generator=torch.Generator().manual_seed(2))
    (weights * (logprobs + entropy)).sum().backward()
    alone = []
    for part, wanted in zip(ids.split(LENGTHS), targets.split(LENGTHS), strict=True):
        values = plain(part[None], torch.arange(len(part)), wanted)
        alone.append(values[0] + values[1])
    torch.testing.assert_close(logprobs + entropy, torch.cat(alone), atol=1e-5, rtol=1e-5)
    (weights * torch.cat(alone)).sum().backward()
    for (name, found), (_, expected) in zip(packed.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("kind", "changes", "packs"),
    [
        ("qwen3", {}, True),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, False),
        ("gpt2", {}, False),
    ],
)
def test_kinds_that_could_mix_sequences_are_padded(
    tmp_path: Path, kind: str, changes: dict[str, Any], packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model(kind, **(SHAPE if kind == "qwen3" else {}))
    for name, value in changes.items():
        setattr(config, name, value)
    config.to_json_file(tmp_path / "config.json")
    assert can_pack(tmp_path, "cpu", torch.float32) is packs
    for kernel_is_right in (True, False):
        monkeypatch.setattr(packed_attention, "_choose_kernel", lambda *_shape, right=kernel_is_right: right)
        assert can_pack(tmp_path, "cuda", torch.bfloat16) is (packs and kernel_is_right)
        assert not can_pack(tmp_path, "cuda", torch.float32), "the kernel has no float32"
    monkeypatch.setenv(packed_attention.ENABLED, "0")
    assert not can_pack(tmp_path, "cpu", torch.float32)


class _Kernels:
    """Computes in float32 on the CPU what the kernels of FlashAttention 4 compute."""

    @staticmethod
    def _flash_attn_fwd(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
        assert options["causal"]
        assert options["return_lse"]
        lengths = options["cu_seqlens_k"].diff().tolist()
        output = packed_attention._one_by_one(query, key, value, lengths, options["softmax_scale"])
        return output.contiguous(), torch.zeros(query.shape[1], query.shape[0]), torch.empty(0), torch.empty(0)

    @staticmethod
    def _flash_attn_bwd(
        query: Tensor, key: Tensor, value: Tensor, output: Tensor, grad: Tensor, lse: Tensor, **options: Any
    ) -> tuple[Tensor, ...]:
        assert lse.shape == (query.shape[1], query.shape[0])
        sharing, scale = query.shape[1] // key.shape[1], options["softmax_scale"]
        q, o, g = (each.transpose(0, 1) for each in (query, output, grad))
        k, v = (each.transpose(0, 1).repeat_interleave(sharing, 0) for each in (key, value))
        sequence = torch.bucketize(torch.arange(len(query)), options["cu_seqlens_q"], right=True)
        seen = (sequence[:, None] == sequence) & torch.ones(len(query), len(query), dtype=torch.bool).tril()
        weights = (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)
        scores_grad = weights * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
        of_heads = scores_grad @ k, scores_grad.mT @ q, weights.mT @ g
        grads = [of_heads[0], *(each.unflatten(0, (-1, sharing)).sum(1) for each in of_heads[1:])]
        return tuple(
            torch.empty_like(each).copy_(found.transpose(0, 1))
            for each, found in zip((query, key, value), grads, strict=True)
        )


def test_flash_attention_4_is_called_forward_and_backward_in_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_4, "kernels", lambda: _Kernels)
    attend = torch.compile(packed_attention._by_flash_attention_4, dynamic=True, backend="aot_eager")
    for lengths in ([4, 3], [5, 1, 6]):
        draw = torch.Generator().manual_seed(0)
        given = [torch.randn(heads, sum(lengths), 8, generator=draw).requires_grad_() for heads in (4, 2, 2)]
        bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        q, k, v = (each.transpose(0, 1) for each in given)
        found = attend(q, k, v, bounds, 8, None, None)
        expected = packed_attention._one_by_one(q, k, v, lengths)
        torch.testing.assert_close(found, expected)
        ours, theirs = (torch.autograd.grad(each.square().sum(), given) for each in (found, expected))
        torch.testing.assert_close(ours, theirs)
    torch.compiler.reset()


def test_without_its_packages_flash_attention_4_is_an_import_error() -> None:
    with pytest.raises(ImportError):
        flash_attention_4.kernels()
    assert not hasattr(sys.modules.get("vllm"), "__path__") or sys.modules["vllm"].__file__ is not None
