from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_client.errors import OutputUnavailable
from rljob_client.plot import plot_run
from tests.unit.ledger.samples import GIB, write_ledger


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_ledger(tmp_path, [step / 20 for step in range(20)])
    return tmp_path


def svg(paths: list[Path], name: str) -> str:
    return next(path for path in paths if path.name == f"{name}.svg").read_text()


def test_four_pictures_are_drawn_each_as_png_and_svg(run: Path) -> None:
    paths = plot_run(run)
    names = [f"{name}.{format}" for name in ("reward", "learning", "timing", "memory") for format in ("png", "svg")]
    assert paths == [run / "plots" / name for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths if path.suffix == ".png")
    assert all("</svg>" in path.read_text() for path in paths if path.suffix == ".svg")


def test_the_plots_can_be_written_to_another_directory(run: Path) -> None:
    assert {path.parent for path in plot_run(run, run / "elsewhere" / "deep")} == {run / "elsewhere" / "deep"}


def test_titles_state_the_result(run: Path) -> None:
    paths = plot_run(run)
    assert "Reward rose from 0.100 to 0.850 in 20 steps" in svg(paths, "reward")
    assert "A step took 1.00 s; rollout was 60% of it" in svg(paths, "timing")
    assert "Memory peaked at 2.00 GiB, in the rollout" in svg(paths, "memory")


def test_each_phase_is_labelled_with_its_share(run: Path) -> None:
    timing = svg(plot_run(run), "timing")
    for label in ("rollout  60%", "update  30%", "between phases  10%"):
        assert label in timing
    assert "sync" not in timing, "a phase that took no time is left out"


def test_the_same_run_gives_the_same_svg(run: Path) -> None:
    assert svg(plot_run(run), "reward") == svg(plot_run(run), "reward")


@pytest.mark.parametrize("steps", [1, 2, 400])
def test_short_and_long_runs_are_drawn(tmp_path: Path, steps: int) -> None:
    write_ledger(tmp_path, [0.5] * steps)
    assert len(plot_run(tmp_path)) == 8


def test_an_unfinished_run_is_drawn_and_not_modified(run: Path) -> None:
    ledger = run / "ledger.jsonl"
    growing = ledger.read_bytes() + b'{"kind": "step", "st'
    ledger.write_bytes(growing)
    assert "in 20 steps" in svg(plot_run(run), "reward")
    assert ledger.read_bytes() == growing


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputUnavailable, match=r"nothing to draw: .* is not the output of a run"):
        plot_run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_step_has_nothing_to_draw_yet(tmp_path: Path) -> None:
    write_ledger(tmp_path, [])
    with pytest.raises(OutputUnavailable, match="no committed step"):
        plot_run(tmp_path)


def test_memory_logs_are_drawn_rather_than_the_ledger_s_numbers(run: Path) -> None:
    write_memory_log(run, "policy-0", [{"peak_reserved": 3 * GIB}, {"peak_reserved": 5 * GIB}], device_total=80 * GIB)
    memory = svg(plot_run(run), "memory")
    assert "Memory peaked at 5.00 GiB, in the policy" in memory
    assert "reserved by torch's allocator on one GPU" in memory
    assert "the GPU: 80 GiB" not in memory, "far from the limit it is left out"


def test_the_size_of_the_gpu_is_drawn_if_the_peaks_are_near(run: Path) -> None:
    write_memory_log(run, "policy-0", [{"peak_reserved": 75 * GIB}], device_total=80 * GIB)
    assert "the GPU: 80 GiB" in svg(plot_run(run), "memory")


def test_without_a_gpu_host_memory_is_drawn(run: Path) -> None:
    write_memory_log(run, "policy-0", [{"rss": GIB, "peak_rss": 2 * GIB}], device_total=0)
    memory = svg(plot_run(run), "memory")
    assert "Memory peaked at 2.00 GiB, in the policy" in memory
    assert "resident host memory" in memory


def write_memory_log(run: Path, actor: str, samples: list[dict[str, Any]], device_total: int) -> None:
    (run / "memory").mkdir(exist_ok=True)
    with (run / "memory" / f"{actor}.jsonl").open("w") as log:
        for micro_batch, sample in enumerate(samples):
            line = {
                "step": 1,
                "phase": "update",
                "micro_batch": micro_batch,
                "device_total": device_total,
                "allocated": 0,
            }
            log.write(json.dumps(line | sample) + "\n")
        log.write('{"step": 2, "pha')
