"""Adapters on one GPU: the planned KV caches, and the place of a model that is as large as the disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.harness.model_place import cache_with_room
from bench.programs.adapters_and_8_bits import ARMS, SMALL_CARD_BYTES, is_small, manifest_of, plan_line, spec_of
from bench.report.large_models import adapters
from rljob_memory.sizes import GIB
from rljob_trainer.models.resolve import resolve_model


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_is_a_valid_job_with_the_plan_of_auto(arm: str) -> None:
    spec = spec_of(manifest_of(arm, steps=2))
    assert spec.memory.kv_cache == spec.memory.policy_offload == "Auto"
    assert spec.policy.lora is not None
    assert spec.policy.lora.export == "Adapter"


@pytest.mark.parametrize("host_gib", [125, 60])
def test_each_arm_generates_its_whole_step_or_nearly(host_gib: int) -> None:
    """With or without room for a copy of the weights on the host."""
    for arm in ARMS:
        line = plan_line(arm, SMALL_CARD_BYTES if is_small(arm) else int(139.8 * GIB), host_gib * GIB)
        at_once, whole = int(line.split(" for ")[1].split()[0]), int(line.split()[-2])
        assert at_once >= 0.7 * whole, line
    assert "policyOffload Enabled" in plan_line("32b", int(139.8 * GIB), host_gib * GIB)
    assert "policyOffload Enabled" in plan_line("8b-40gib", SMALL_CARD_BYTES, host_gib * GIB)


TINY = "random://qwen3?hidden=32&layers=1&heads=2&kvHeads=1&headDim=16&vocabulary=64"


@pytest.mark.parametrize(("free_gib", "is_there", "on_disk"), [(66, False, True), (64, False, False), (1, True, True)])
def test_a_model_that_fills_the_disk_is_written_to_memory(
    free_gib: int, is_there: bool, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_gib * GIB))
    disk, memory = tmp_path / "cache" / "rljob", tmp_path / "memory"
    if is_there:
        resolve_model(TINY, disk)
    assert cache_with_room(TINY, 61 * GIB, disk, memory) == (disk if on_disk else memory)


def test_the_table_has_a_name_for_each_arm_also_if_it_failed() -> None:
    rows = [{"arm": arm, "message": "out of memory"} for arm in ARMS]
    result = {"script": "s", "date": "d", "device": "g", "versions": {}, "note": "n", "rows": rows}
    assert adapters(result).count(": failed |") == len(ARMS)
