"""Packed sequences give what each gives alone, in every kind of model that packs."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rljob_trainer.algorithm.packing import BOUNDS, packing_of
from rljob_trainer.policy import flash_attention_2, flash_attention_4, packed_attention, packed_kernel
from rljob_trainer.policy.flash_attention_2 import Pairing
from rljob_trainer.policy.model import PolicyModel, compilations, compile_layers
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
    logprobs, entropy = packed(ids[None], rows, targets, **packing_of(LENGTHS))
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


CONTINUED = [2, 1, 0]
SHARED = [5, 9, 3, 4, 1, 6, 2]
"""Three prompts, of which two sequences continue the first and one the second; then another sequence."""


@pytest.mark.parametrize(
    ("kind", "changes"), [*((kind, {}) for kind in sorted(PACKED_KINDS)), ("mistral", {"sliding_window": 4})]
)
def test_a_shared_prompt_gives_what_its_copies_give(kind: str, changes: dict[str, Any]) -> None:
    model = model_of(kind, packed_attention.NAME, **changes)
    ids = torch.randint(1, 64, (sum(SHARED),), generator=torch.Generator().manual_seed(1))
    parts = list(ids.split(SHARED))
    copied = [torch.cat([parts[0], parts[3]]), torch.cat([parts[0], parts[4]]), torch.cat([parts[1], parts[5]])]
    copied += [parts[2], parts[6]]
    lengths = [len(part) for part in copied]
    # The rows of each sequence after its prompt, of which a shared prompt's last one predicts twice.
    rows_of_copies = torch.cat(
        [torch.arange(4, 9), 9 + torch.arange(4, 6), 15 + torch.arange(8, 15), torch.arange(30, 35)]
    )
    rows = torch.tensor([4, *range(17, 21), 4, 21, 13, *range(22, 28), *range(14, 17), *range(28, 30)])
    targets = torch.randint(1, 64, (len(rows),), generator=torch.Generator().manual_seed(2))
    weights = torch.randn(len(rows), generator=torch.Generator().manual_seed(3))
    found: list[Any] = []
    for row, chosen, packing in (
        (ids, rows, packing_of(SHARED, CONTINUED)),
        (torch.cat(copied), rows_of_copies, packing_of(lengths)),
    ):
        logprobs, entropy = model(row[None], chosen, targets, **packing)
        grads = torch.autograd.grad((weights * (logprobs + entropy)).sum(), list(model.parameters()))
        found.append((logprobs, entropy, *grads))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


def dense(query: Tensor, key: Tensor, bounds: Tensor, key_bounds: Tensor, scaling: float, window: int | None) -> Tensor:
    """[heads, queries, keys] Scores, −∞ where a query does not attend."""
    scores = scaling * torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(query.shape[1] // key.shape[1], 1))
    allowed = torch.zeros(scores.shape[1:], dtype=torch.bool)
    for (start, stop), (first, last) in zip(pairwise(bounds.tolist()), pairwise(key_bounds.tolist()), strict=True):
        distance = torch.arange(stop - start)[:, None] - torch.arange(last - first)
        allowed[start:stop, first:last] = window is None or ((distance >= 0) & (distance < (window or len(query))))
    return scores.masked_fill(~allowed, -torch.inf)


def dense_kernel(query: Tensor, key: Tensor, value: Tensor, pairing: Pairing, scaling: float) -> tuple[Tensor, Tensor]:
    bounds, key_bounds, longest, longest_key, window = pairing
    assert longest >= bounds.diff().max()
    assert longest_key >= key_bounds.diff().max()
    scores = dense(query, key, bounds, key_bounds, scaling, window)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)


def dense_kernel_backward(
    output_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizers: Tensor,
    pairing: Pairing,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from the normalizers that it is given, as the kernels compute them."""
    bounds, key_bounds, _, _, window = pairing
    kv_heads, shared = key.shape[1], query.shape[1] // key.shape[1]
    probabilities = (dense(query, key, bounds, key_bounds, scaling, window) - normalizers[:, :, None]).exp()
    slopes = torch.einsum("qhd,khd->hqk", output_grad, value.repeat_interleave(shared, 1))
    slopes = scaling * probabilities * (slopes - (output_grad * output).sum(-1).T[:, :, None])
    grads = (
        torch.einsum("hqk,khd->qhd", slopes, key.repeat_interleave(shared, 1)),
        torch.einsum("hqk,qhd->khd", slopes, query),
        torch.einsum("hqk,qhd->khd", probabilities, output_grad),
    )
    return grads[0], *(grad.unflatten(1, (kv_heads, shared)).sum(2) for grad in grads[1:])


@pytest.mark.parametrize("kernel", [flash_attention_2, flash_attention_4])
@pytest.mark.parametrize(
    ("lengths", "continued"), [(LENGTHS, []), (SHARED, CONTINUED), ([4, 1], [1]), ([3], [0]), ([2, 3, 2, 2], [1, 1])]
)
def test_two_calls_of_a_kernel_attend_to_shared_prompts_as_one_softmax(
    lengths: list[int], continued: list[int], kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_kernel, "causal_kernel", kernel)
    monkeypatch.setattr(flash_attention_4, "kernels", lambda: _Kernels)
    monkeypatch.setattr(flash_attention_2, "forward", dense_kernel)
    monkeypatch.setattr(flash_attention_2, "backward", dense_kernel_backward)
    generator = torch.Generator().manual_seed(0)
    query, key, value, weights = (
        torch.randn(sum(lengths), heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2, 4)
    )
    packing = packing_of(lengths, continued)
    layout = *(packing[name] for name in BOUNDS), torch.tensor(packing["sizes"])
    found = []
    for output in (
        packed_kernel.attend(query, key, value, *layout, 8**-0.5, 0)[0],
        packed_attention._one_by_one(query, key, value, *layout),
    ):
        found.append((output, *torch.autograd.grad((output * weights).sum(), (query, key, value))))
    torch.testing.assert_close(found[0], found[1])


def test_a_layer_is_compiled_once_for_prompts_that_are_shared_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_2, "forward", dense_kernel)
    monkeypatch.setattr(flash_attention_2, "backward", dense_kernel_backward)
    monkeypatch.setattr(
        packed_attention,
        "_one_by_one",
        lambda *arguments: packed_kernel.attend(*arguments[:-2], arguments[-2], arguments[-1] or 0)[0],
    )
    model = model_of("qwen3", packed_attention.NAME)
    torch._dynamo.reset()
    compile_layers(model.decoder_layers, backend="aot_eager")
    compiled = set()
    for lengths, continued in ((LENGTHS, []), (SHARED, CONTINUED), ([6, 5], [1]), ([9], [])):
        ids = torch.arange(sum(lengths))
        logprobs, _ = model(ids[None], ids, ids, **packing_of(lengths, continued))
        logprobs.sum().backward()
        compiled.add(compilations())
    torch._dynamo.reset()
    assert len(compiled) == 1


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


@pytest.mark.parametrize(
    ("right", "kernel", "shares"),
    [
        ({(flash_attention_4, True), (flash_attention_2, True)}, flash_attention_4, True),
        ({(flash_attention_4, False), (flash_attention_2, True)}, flash_attention_4, False),
        ({(flash_attention_2, True)}, flash_attention_2, True),
        ({(flash_attention_2, False)}, flash_attention_2, False),
        (set(), None, False),
    ],
)
def test_prompts_are_repeated_where_attention_to_shared_ones_is_wrong(
    right: set[tuple[ModuleType, bool]], kernel: ModuleType | None, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(packed_kernel, "causal_kernel", flash_attention_2)
    monkeypatch.setattr(packed_kernel, "can_share_prompts", True)
    monkeypatch.setattr(
        packed_attention,
        "_is_right",
        lambda *_shape: (packed_kernel.causal_kernel, packed_kernel.can_share_prompts) in right,
    )
    assert packed_attention._choose_kernel.__wrapped__(32, 8, 128) is (kernel is not None)
    assert kernel in (None, packed_kernel.causal_kernel)
    assert model_of("qwen3", packed_attention.NAME).shares_prompts is shares


class _Kernels:
    """Stand-ins for the kernels of FlashAttention 4, on the CPU."""

    @staticmethod
    def _flash_attn_fwd(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
        assert options["causal"]
        assert options["return_lse"]
        return *dense_kernel(query, key, value, *_pairing(options)), torch.empty(0), torch.empty(0)

    @staticmethod
    def _flash_attn_bwd(
        query: Tensor, key: Tensor, value: Tensor, output: Tensor, grad: Tensor, lse: Tensor, **options: Any
    ) -> tuple[Tensor, ...]:
        return dense_kernel_backward(grad, query, key, value, output, lse, *_pairing(options))


def _pairing(options: dict[str, Any]) -> tuple[Pairing, float]:
    bounds, key_bounds = options["cu_seqlens_q"], options["cu_seqlens_k"]
    return Pairing(bounds, key_bounds, options["max_seqlen_q"], options["max_seqlen_k"], 0), options["softmax_scale"]


def test_without_its_packages_flash_attention_4_is_an_import_error() -> None:
    with pytest.raises(ImportError):
        flash_attention_4.kernels()
    assert not hasattr(sys.modules.get("vllm"), "__path__") or sys.modules["vllm"].__file__ is not None
