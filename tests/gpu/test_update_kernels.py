"""The kernels of an update: attention over packed sequences, and products that add to the sums of gradients."""

from __future__ import annotations

import pytest
import torch

from rljob_testing.policy_models import read_policy_model
from rljob_trainer.algorithm.gradient_sums import sum_matrices
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy import flash_attention_4, packed_attention, packed_kernel
from rljob_trainer.policy.gradients import Gradients
from rljob_trainer.policy.model import compilations, compile_layers

pytestmark = pytest.mark.gpu
MODEL = "random://qwen3?hidden=1024&intermediate=3072&layers=2&heads=16&kvHeads=8&headDim=128&vocabulary=1024&tied=true"


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (14, 2, 64)])
def test_hopper_and_blackwell_get_flash_attention_4(heads: int, kv_heads: int, head_dim: int) -> None:
    pytest.importorskip("cutlass.cute")
    if torch.cuda.get_device_capability()[0] not in packed_attention._FLASH_ATTENTION_4:
        pytest.skip("needs a Hopper or Blackwell GPU")
    assert packed_attention._choose_kernel(heads, kv_heads, head_dim)
    assert packed_kernel.causal_kernel is flash_attention_4
    assert packed_kernel.can_share_prompts


def test_products_add_to_the_sums_of_gradients_in_compiled_layers() -> None:
    torch.compiler.reset()
    models = [
        read_policy_model(resolve_model(MODEL), temperature=1.0, chunk_tokens=256).to("cuda", dtype)
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
    ]
    sum_matrices(models[0])
    compile_layers(models[0].decoder_layers)
    sums = [Gradients(list(model.parameters())) for model in models]
    compiled = []
    for number in range(4):
        ids = torch.randint(1024, (2, 600 + 8 * number), device="cuda")  # rows of another alignment need a graph more
        rows, targets = torch.arange(ids.numel(), device="cuda"), ids.flatten()
        for model, gradients in zip(models, sums, strict=True):
            with gradients.added_up():
                model(ids, rows, targets)[0].mean().backward()
        compiled.append(compilations())
    errors = []
    for number in range(len(sums[0].all())):
        found, rounded, exact = (each.of(number) for each in sums)
        assert found is not None
        assert rounded is not None
        assert exact is not None
        errors.append([float((each - exact).norm() / exact.norm()) for each in (found, rounded)])
    assert all(ours <= 1.2 * theirs for ours, theirs in errors), errors
    assert compiled[0] == compiled[-1], "another length compiles nothing"
