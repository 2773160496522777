from __future__ import annotations

import pytest
import torch

from rljob_trainer.policy import memory_mitigations
from rljob_trainer.policy.memory_mitigations import allocator_settings, classic_segments, optimizer_on_device


def test_the_whole_settings_string_is_kept_with_one_key_changed() -> None:
    inherited = "garbage_collection_threshold:0.8,expandable_segments:False,roundup_power2_divisions:[256:1,512:2]"
    assert allocator_settings(inherited, expandable_segments=True) == (
        "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2],expandable_segments:True"
    )
    assert allocator_settings("", expandable_segments=False) == "expandable_segments:False"


@pytest.fixture
def settings_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator is told, in order; a cache that is handed back shows as `flush`."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("flush"))
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return told


def test_expandable_segments_come_back_also_when_the_export_fails(settings_made: list[str]) -> None:
    def export() -> None:
        with classic_segments(expandable_segments=True):
            assert settings_made == ["expandable_segments:False", "flush"]
            raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        export()
    assert settings_made[2:] == ["expandable_segments:True"]


def test_where_segments_are_classic_anyway_nothing_is_set(settings_made: list[str]) -> None:
    with classic_segments(expandable_segments=False):
        pass
    assert settings_made == []


def test_older_torch_is_told_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    memory_mitigations.set_expandable_segments(True)
    assert told == ["max_split_size_mb:64,expandable_segments:True"]


def test_an_offloaded_optimizer_state_is_on_the_device_only_within() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state[parameter]
    # Any second device shows the moves; `meta` is one that every machine has.
    with optimizer_on_device(optimizer, torch.device("meta"), offload=False):
        assert state["exp_avg"].device.type == "cpu"
    with pytest.raises(NotImplementedError), optimizer_on_device(optimizer, torch.device("meta"), offload=True):
        assert state["exp_avg"].device.type == "meta"
