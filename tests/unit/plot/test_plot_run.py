"""The plots of a run, as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_trainer.errors import OutputUnavailable
from rljob_trainer.plot import plot_run
from tests.unit.ledger.samples import GIB, write_ledger


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_ledger(tmp_path, [step / 20 for step in range(20)])
    return tmp_path


def svg(paths: list[Path], name: str) -> str:
    return next(path for path in paths if path.name == f"{name}.svg").read_text()


def test_four_pictures_state_the_result_as_png_and_svg(run: Path) -> None:
    ledger = run / "ledger.jsonl"
    growing = ledger.read_bytes() + b'{"kind": "step", "st'
    ledger.write_bytes(growing)
    paths = plot_run(run)
    assert ledger.read_bytes() == growing, "the ledger of an unfinished run is not modified"
    names = [f"{name}.{format}" for name in ("reward", "learning", "timing", "memory") for format in ("png", "svg")]
    assert paths == [run / "plots" / name for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths if path.suffix == ".png")
    assert all("</svg>" in path.read_text() for path in paths if path.suffix == ".svg")
    assert "Reward rose from 0.100 to 0.850 in 20 steps" in svg(paths, "reward")
    timing = svg(paths, "timing")
    assert "A step took 1.00 s; rollout was 60% of it" in timing
    assert all(label in timing for label in ("rollout  60%", "update  30%", "between phases  10%"))
    assert "sync" not in timing, "a phase that took no time is left out"
    assert "Memory peaked at 2.00 GiB, in the rollout" in svg(paths, "memory")

    again = plot_run(run, run / "elsewhere" / "deep")
    assert {path.parent for path in again} == {run / "elsewhere" / "deep"}
    assert svg(again, "reward") == svg(paths, "reward")


@pytest.mark.parametrize("steps", [1, 2, 400])
def test_short_and_long_runs_are_drawn(tmp_path: Path, steps: int) -> None:
    write_ledger(tmp_path, [0.5] * steps)
    assert len(plot_run(tmp_path)) == 8


def test_without_a_step_nothing_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(OutputUnavailable, match=r"nothing to draw: .* is not the output of a run"):
        plot_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "ledger.jsonl").write_text("")
    with pytest.raises(OutputUnavailable, match="nothing to draw yet"):
        plot_run(tmp_path)
    write_ledger(tmp_path, [])
    with pytest.raises(OutputUnavailable, match="no committed step"):
        plot_run(tmp_path)
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("samples", "shown", "absent"),
    [
        (
            [{"peak_reserved": 3 * GIB}, {"peak_reserved": 5 * GIB}],
            ["Memory peaked at 5.00 GiB, in the policy", "reserved by torch's allocator on one GPU"],
            "the GPU: 80 GiB",
        ),
        ([{"peak_reserved": 75 * GIB}], ["the GPU: 80 GiB"], "resident"),
        (
            [{"rss": GIB, "peak_rss": 2 * GIB, "device_total": 0}],
            ["Memory peaked at 2.00 GiB, in the policy", "resident host memory"],
            "the GPU",
        ),
    ],
    ids=["far from the limit", "near the limit", "without a GPU"],
)
def test_memory_logs_are_drawn_rather_than_the_ledgers_numbers(
    run: Path, samples: list[dict[str, Any]], shown: list[str], absent: str
) -> None:
    (run / "memory").mkdir()
    with (run / "memory" / "policy-0.jsonl").open("w") as log:
        for number, sample in enumerate(samples):
            line = {"step": 1, "phase": "update", "micro_batch": number, "device_total": 80 * GIB, "allocated": 0}
            log.write(json.dumps(line | sample) + "\n")
        log.write('{"step": 2, "pha')
    memory = svg(plot_run(run), "memory")
    assert all(text in memory for text in shown)
    assert absent not in memory
