"""Weights leave a GPU and come back bit for bit, in classic and in expandable segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy.caching_allocator import ExpandableSegments, cache_released_after
from rljob_trainer.policy.model import build_policy_model, sent_name
from rljob_trainer.policy.policy_offload import PolicyOffload
from rljob_trainer.policy.weight_loading import load_weights, read_frozen_weights
from rljob_trainer.weight_sync.colocated import Staging

pytestmark = pytest.mark.gpu
MODEL = "random://qwen3?hidden=1024&intermediate=3072&layers=4&heads=16&kvHeads=8&headDim=128&vocabulary=8192&tied=true"
MIB = 1 << 20


@pytest.fixture
def model() -> Any:
    """In bfloat16 on the GPU: norms are trained, all other weights are frozen."""
    torch.cuda.empty_cache()
    directory = resolve_model(f"{MODEL}&dtype=bfloat16")
    built = build_policy_model(directory, temperature=1.0, chunk_tokens=256, dtype=torch.bfloat16)
    built._apply(lambda tensor: tensor if tensor.is_meta else tensor.cuda())
    load_weights(built, directory, "cuda", sent_name)
    for parameter in built.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    return built


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("from_files", [False, True])
def test_weights_leave_the_gpu_and_return(model: Any, expandable: bool, from_files: bool) -> None:
    def read() -> None:
        read_frozen_weights([model], resolve_model(f"{MODEL}&dtype=bfloat16"), "cuda", sent_name)

    segments = ExpandableSegments()
    if expandable:
        segments.enable()
    try:
        expected = {name: each.detach().cpu() for name, each in model.named_parameters()}
        weights = sum(each.nbytes for each in model.parameters())
        offload = PolicyOffload([model], torch.device("cuda"), read if from_files else None)
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            with cache_released_after(enabled=True):
                offload.offload()
            assert torch.cuda.memory_allocated() <= before - weights + MIB
            assert torch.cuda.memory_reserved() <= before - weights + 128 * MIB
            assert offload.copies.keys() == {name for name, each in model.named_parameters() if each.requires_grad}
            offload.bring_back()
            for name, parameter in model.named_parameters():
                assert parameter.is_cuda
                assert torch.equal(parameter.detach().cpu(), expected[name]), name
        # As in a sync: what another process reads is packed into classic memory.
        name, largest = max(model.named_parameters(), key=lambda pair: pair[1].numel())
        with segments.disabled():
            staging = Staging(largest.nbytes, is_kept=False)
        assert staging.filled([(name, largest.detach())])["handles"]
    finally:
        if expandable:
            segments.disable()


def test_weights_that_find_no_room_stay_away(model: Any) -> None:
    weights = sum(each.nbytes for each in model.parameters())
    expected = {name: each.detach().cpu() for name, each in model.named_parameters()}
    offload = PolicyOffload([model], torch.device("cuda"))
    offload.offload()
    torch.cuda.empty_cache()
    taken = torch.empty(torch.cuda.mem_get_info()[0] - weights // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        offload.bring_back()
    assert offload.offloaded
    assert all(each.untyped_storage().nbytes() == 0 for each in model.parameters())
    del taken
    torch.cuda.empty_cache()
    offload.bring_back()
    assert all(torch.equal(each.detach().cpu(), expected[name]) for name, each in model.named_parameters())
