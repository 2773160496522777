"""Mitigations that leave GPU memory to the engine, tested without a GPU by the calls of the allocator."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
import torch

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_client.errors import RunError
from rljob_memory.allocator import setting_problems
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.policy import exporting_rank
from rljob_trainer.policy.caching_allocator import (
    MIN_RELEASE_BYTES,
    ExpandableSegments,
    cache_released_after,
    settings_with,
)
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.exporting_rank import ExportingRank

ON, OFF = "expandable_segments:True", "expandable_segments:False"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings passed to the allocator, in order; `flush` stands for an emptied cache."""
    calls: list[str] = []
    monkeypatch.setattr(
        torch._C,
        "_accelerator_setAllocatorSettings",
        lambda settings: calls.append(settings.rpartition(",large_segment_size_mb")[0]),
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("flush"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return calls


def expandable() -> ExpandableSegments:
    segments = ExpandableSegments()
    segments.enable()
    return segments


# --- expandable segments ---


@pytest.mark.parametrize(
    ("inherited", "enabled", "expected"),
    [
        (
            f"roundup_power2_divisions:[256:1,512:2],{OFF}",
            True,
            f"roundup_power2_divisions:[256:1,512:2],{ON},large_segment_size_mb:256",
        ),
        ("", True, f"{ON},large_segment_size_mb:256"),
        ("", False, f"{OFF},large_segment_size_mb:20"),  # torch's own size
        ("large_segment_size_mb:64", True, f"large_segment_size_mb:64,{ON}"),
    ],
)
def test_segments_are_switched_beside_inherited_settings_with_large_pages(
    inherited: str, enabled: bool, expected: str
) -> None:
    made = settings_with(inherited, expandable_segments=enabled)
    assert made == expected
    assert setting_problems(made, (2, 11)) == []


def test_segments_come_back_once_after_nested_and_failed_exports(calls: list[str]) -> None:
    segments = expandable()

    def export() -> None:
        with segments.disabled():
            with segments.disabled():
                pass
            assert not segments.enabled, "the inner block must not switch on what the outer one needs off"
            assert calls == [ON, OFF, "flush"]
            raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        export()
    assert calls[3:] == [ON]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("", []),
        (f"max_split_size_mb:64,{ON}", [f"max_split_size_mb:64,{OFF}", "flush", f"max_split_size_mb:64,{ON}"]),
    ],
)
def test_the_state_at_the_start_is_that_of_the_environment(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, environment: str, expected: list[str]
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", environment)
    segments = ExpandableSegments()
    assert segments.enabled is bool(environment)
    with segments.disabled():
        pass
    assert calls == expected


def test_failing_to_disable_segments_fails_the_sync_and_to_enable_warns(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = expandable()

    def refuse(_settings: str) -> None:
        raise ValueError("no such setting")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse)
    with pytest.raises(RunError, match=r"no such setting; set memory\.expandableSegments: Disabled"):
        segments.disable()
    assert segments.enabled

    classic = ExpandableSegments()
    with structlog.testing.capture_logs() as logs:
        classic.enable()
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert not classic.enabled


# --- weight export ---


class Rank(ExportingRank):
    """Without a model. Its largest parameters that are sent together have 30 bytes."""

    def __init__(self, directory: Path, memory: MemoryPlan, ranks: int = 2) -> None:
        config = PolicyConfig(directory, directory, "cuda", "bfloat16", AlgorithmSpec(steps=1), memory)
        super().__init__(0, ranks, config)
        self._segments.enable()

    @property
    def _model(self) -> Any:
        return None

    @contextmanager
    def weights_for_sync(self) -> Iterator[Any]:
        yield iter(())

    def _staged_bytes(self, _model: Any) -> int:
        return max(self.config.memory.sync_bucket_bytes, 30)

    def use(self, memory: MemoryPlan) -> None:
        self.config = replace(self.config, memory=memory)
        self._arrange_kept_buffers(cast(Any, None))

    def sent_through(self) -> Any:
        """The buffers of a sync."""
        with self.weights_for_export() as (_, staging):
            return staging


@pytest.fixture
def allocated(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Buffers for exported weights, in the order of their allocation."""
    found: list[SimpleNamespace] = []

    def allocate(capacity_bytes: int, *, is_kept: bool) -> SimpleNamespace:
        calls.append("allocate")
        freed = partial(calls.append, "free")
        found.append(SimpleNamespace(capacity_bytes=capacity_bytes, is_kept=is_kept, free=freed))
        return found[-1]

    monkeypatch.setattr(exporting_rank, "Staging", allocate)
    return found


def reserving(bucket_bytes: int) -> MemoryPlan:
    return memory_plan(sync_bucket_bytes=bucket_bytes, weight_export="ReservedBuffer")


def test_switching_uses_classic_memory_only_for_the_buffers(
    calls: list[str], allocated: list[SimpleNamespace], tmp_path: Path
) -> None:
    rank = Rank(tmp_path, memory_plan())
    rank.use(memory_plan(weight_export="SwitchSegments"))
    with rank.weights_for_export() as (_, staging):
        assert calls == [ON, OFF, "flush", "allocate", ON]
        assert staging is not None
        assert not staging.is_kept
    assert calls[5:] == ["free", "flush"]


def test_a_reserved_buffer_fits_the_largest_parameter_and_only_grows(
    calls: list[str], allocated: list[SimpleNamespace], tmp_path: Path
) -> None:
    rank = Rank(tmp_path, memory_plan())
    sizes = []
    for bucket_bytes in (20, 100, 50):
        rank.use(reserving(bucket_bytes))
        sizes.append(rank.sent_through().capacity_bytes)
    assert sizes == [30, 100, 100]
    assert all(buffers.is_kept for buffers in allocated)
    assert calls == [ON, *(OFF, "flush", "allocate", ON) * 2], "a sync neither switches nor flushes"
    rank.use(memory_plan())
    assert not rank.sent_through().is_kept


def test_a_single_rank_needs_buffers_only_for_weights_that_move(
    calls: list[str], allocated: list[SimpleNamespace], tmp_path: Path
) -> None:
    rank = Rank(tmp_path, memory_plan(), ranks=1)
    for plan in (memory_plan(), reserving(50)):
        rank.use(plan)
        assert rank.sent_through() is None
    assert not allocated
    assert calls == [ON]
    rank.use(memory_plan(policy_offload=True))
    assert rank.sent_through() is not None


# --- cached memory ---


@pytest.fixture
def caching(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that the fake allocator caches, in addition to 7 in use."""
    cached = [MIN_RELEASE_BYTES]
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats",
        lambda: {"reserved_bytes.all.current": cached[0] + 7, "allocated_bytes.all.current": 7},
    )
    return cached


@pytest.mark.parametrize(
    ("cached", "enabled", "flushes"),
    [(MIN_RELEASE_BYTES, True, ["flush"]), (MIN_RELEASE_BYTES - 1, True, []), (MIN_RELEASE_BYTES, False, [])],
)
def test_cached_memory_is_released_if_it_is_worth_a_flush(
    calls: list[str], caching: list[int], cached: int, enabled: bool, flushes: list[str]
) -> None:
    caching[0] = cached
    with cache_released_after(enabled=enabled):
        pass
    assert calls == flushes


def test_a_failed_phase_frees_its_tensors_even_if_the_error_is_kept(calls: list[str], caching: list[int]) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def phase() -> None:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError) as kept, cache_released_after(enabled=True):
        phase()
    assert kept.value.__traceback__ is not None
    assert held[0]() is None
    assert calls == ["flush"]


def test_emptying_the_cache_takes_effect_at_once(calls: list[str], caching: list[int], tmp_path: Path) -> None:
    """The engine that could not wake is restarted next, before any phase of the policy ends."""
    hoarding = memory_plan(empty_cache=False, expandable_segments=False)
    rank: Any = ExportingRank(
        0, 1, PolicyConfig(tmp_path, tmp_path, "cuda", "bfloat16", AlgorithmSpec(steps=1), hoarding)
    )
    rank._loaded = SimpleNamespace(model=SimpleNamespace(chunk_tokens=0), update=SimpleNamespace(config=None))
    rank.change_memory(hoarding.model_copy(update={"logprob_chunk_tokens": 32}))
    assert calls == []
    rank.change_memory(hoarding.model_copy(update={"empty_cache": True}))
    assert calls == ["flush"]
