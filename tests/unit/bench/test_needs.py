"""Checks of benchmarks before they start: GPUs, packages, and the device of earlier rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness import needs, record
from rljob_testing.patience import PATIENCE_SECONDS
from rljob_testing.repository import ROOT
from rljob_trainer.hardware import Gpu

ONE_GPU = [Gpu("NVIDIA H100 80GB HBM3", 80 << 30, (9, 0))]


def test_a_program_for_two_gpus_refuses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "visible_gpus", lambda: ONE_GPU)
    needs.require_gpus(1)
    with pytest.raises(SystemExit, match="expected 2 NVIDIA GPUs, found NVIDIA H100 80GB HBM3"):
        needs.require_gpus(2)


@pytest.mark.parametrize("program", ["topologies", "tensor_parallel", "ranks_recover"])
def test_without_gpus_they_refuse_before_they_import_torch(program: str, tmp_path: Path) -> None:
    check = (
        f"import runpy, sys; sys.argv = [{program!r}, {'--output'!r}, {str(tmp_path / 'out')!r}]\n"
        f"try: runpy.run_module('bench.programs.{program}', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, *({'torch', 'vllm', 'ray', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    assert done.stdout.startswith("expected 2 NVIDIA GPUs, found")
    assert done.stdout.strip().endswith("CUDA_VISIBLE_DEVICES")
    assert not (tmp_path / "out").exists()


def test_a_package_is_required_and_one_that_breaks_it_is_refused() -> None:
    needs.require_package("json")
    with pytest.raises(SystemExit, match="expected the package no_such_trainer, found none"):
        needs.require_package("no_such_trainer")
    with pytest.raises(SystemExit, match="expected an environment without yaml, which breaks json"):
        needs.require_package("json", without="yaml")


def test_rows_of_another_device_are_neither_kept_nor_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "device", lambda: "NVIDIA H200")
    assert record.recorded("result", tmp_path) == []
    record.record("result", [{"arm": "8b"}], "Note", tmp_path)
    assert record.recorded("result", tmp_path) == [{"arm": "8b"}]
    monkeypatch.setattr(record, "device", lambda: "NVIDIA H100")
    with pytest.raises(SystemExit, match=r"expected .* to be of NVIDIA H100, found rows of NVIDIA H200"):
        record.recorded("result", tmp_path)


def test_a_result_counts_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "device", lambda: "NVIDIA H200")
    file = record.record("result", [], "Note", tmp_path, gpus=2)
    assert json.loads(file.read_text())["device"] == "2 × NVIDIA H200"
