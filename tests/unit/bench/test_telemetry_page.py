"""docs/telemetry.md agrees with the code."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from bench.report.training import telemetry
from rljob_memory.diagnosis import FailureClass
from rljob_memory.sample import MemorySample
from rljob_trainer.telemetry.memory import MemoryLog, quick_sample, sample_memory

PAGE = (Path(__file__).parents[3] / "docs" / "telemetry.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def numbers(*, of_micro_batches: bool) -> set[str]:
    rows = [row.split("|") for row in section("Memory fields").splitlines() if row.startswith("| `")]
    return {
        name for row in rows for name in re.findall(r"`(\w+)`", row[1]) if row[2].strip() == "·" or not of_micro_batches
    }


PLACE = {"time", "began", "step", "phase", "micro_batch"}


def test_exactly_the_numbers_of_a_sample_are_documented() -> None:
    assert numbers(of_micro_batches=False) == {field.name for field in fields(MemorySample)} - PLACE


def test_marked_numbers_are_those_of_a_micro_batch(tmp_path: Path) -> None:
    quick, whole = quick_sample("cpu"), sample_memory("cpu")
    only_whole = {
        field.name for field in fields(MemorySample) if getattr(whole, field.name) and not getattr(quick, field.name)
    }
    assert not only_whole & numbers(of_micro_batches=True)


def test_a_line_of_the_log_has_the_documented_keys(tmp_path: Path) -> None:
    MemoryLog(tmp_path / "policy-0.jsonl", "cpu").record(1, "update", 0)
    line = json.loads((tmp_path / "policy-0.jsonl").read_text())
    assert set(line) <= PLACE | numbers(of_micro_batches=True)


def test_the_classes_of_the_warning_are_classes() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", section("Early warning"))) - {"MemoryPressure"}
    assert named <= {str(failure_class) for failure_class in FailureClass}


def test_a_failed_arm_is_left_out_of_the_table() -> None:
    row = {"arm": "samples alone", "micro_batch_microseconds": 61.0, "phase_microseconds": 900.0, "line_bytes": 300}
    rows = [row | {"micro_batches": 30, "share_percent": 0.21}, {"arm": "log on and off in turn", "error": "OSError"}]
    made = telemetry({"device": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "rows": rows})
    assert "| sample of a micro-batch | 61 µs |" in made
    assert "0.21 % of the update" in made
    assert "in turn" not in made
