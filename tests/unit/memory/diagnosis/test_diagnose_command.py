"""Output and exit codes of `rljob diagnose`."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from rljob_trainer.cli import app
from tests.unit.memory.diagnosis.recorded import RECORDED

FRAGMENTED = RECORDED / "Fragmentation" / "mgfn-35.txt"


def invoke(*arguments: str, stdin: bytes | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["diagnose", *arguments], input=stdin)
    return result.exit_code, result.stdout, result.stderr


def test_json_is_a_list_best_first() -> None:
    code, output, _ = invoke(str(FRAGMENTED), "--json")
    diagnoses = json.loads(output)
    assert code == 0
    assert [set(diagnosis) for diagnosis in diagnoses] == [
        {"class", "confidence", "message", "numbers", "advice"} for _ in diagnoses
    ]
    assert diagnoses[0]["class"] == "Fragmentation"
    assert diagnoses[0]["numbers"]["requested_bytes"] == round(1.7 * 2**30)
    assert [d["confidence"] for d in diagnoses] == sorted((d["confidence"] for d in diagnoses), reverse=True)


def test_text_output_has_class_confidence_message_numbers_and_advice() -> None:
    code, output, _ = invoke(str(FRAGMENTED))
    assert code == 0
    text = " ".join(output.split())
    for part in (
        "Fragmentation confidence 0.85",
        "torch asked for 1.70 GiB",
        "allocated 2.93 GiB",
        "expandableSegments",
    ):
        assert part in text


def test_a_job_without_a_failure_gets_a_message(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1 reward 0.5\n")
    assert invoke(str(log), "--json")[:2] == (0, "[]\n")
    code, output, _ = invoke(str(log))
    assert code == 0
    assert output.startswith("No out-of-memory failure found in")


def test_unreadable_input_exits_with_2_and_a_message(tmp_path: Path) -> None:
    code, output, error = invoke(str(tmp_path / "missing"))
    assert (code, output) == (2, "")
    assert "No such file" in error
