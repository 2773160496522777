"""Output and exit codes of `rljob diagnose`."""

from __future__ import annotations

import json
from pathlib import Path, PurePath

import pytest
from typer.testing import CliRunner

from rljob_client.cli import app
from tests.unit.memory.diagnosis.recorded import recorded_texts


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["diagnose", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def fragmented(tmp_path: Path) -> str:
    """A log of a failure of the class Fragmentation."""
    log = tmp_path / "fragmented.log"
    log.write_text(recorded_texts()[PurePath("Fragmentation/mgfn-35")])
    return str(log)


@pytest.fixture
def healthy(tmp_path: Path) -> str:
    """A log without a failure."""
    log = tmp_path / "train.log"
    log.write_text("step 1 reward 0.5\n")
    return str(log)


def test_json_is_a_list_best_first(fragmented: str) -> None:
    code, output, _ = invoke(fragmented, "--json")
    diagnoses = json.loads(output)
    assert code == 0
    assert all(each.keys() == {"class", "confidence", "message", "numbers", "advice"} for each in diagnoses)
    assert diagnoses[0]["class"] == "Fragmentation"
    assert diagnoses[0]["numbers"]["requested_bytes"] == round(1.7 * 2**30)
    assert [d["confidence"] for d in diagnoses] == sorted((d["confidence"] for d in diagnoses), reverse=True)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            [],
            [
                *("Fragmentation confidence 0.60", "torch asked for 1.70 GiB", "allocated 2.93 GiB"),
                "expandable_segments:True for the training process",
            ],
        ),
        (
            ["--explain"],
            [
                *("tensors of the failing process 2.93 GiB", "torch's cache in it 2.30 GiB", "from torch's message"),
                "Causes that fit, with what is beyond the expected memory Fragmentation certain 2.30 GiB",
            ],
        ),
    ],
)
def test_the_output_has_the_class_its_numbers_and_advice(fragmented: str, options: list[str], parts: list[str]) -> None:
    code, output, _ = invoke(fragmented, *options)
    assert code == 0
    text = " ".join(output.split())
    assert [part for part in parts if part not in text] == []


def test_an_explanation_as_json_has_causes_and_balances(fragmented: str) -> None:
    found = json.loads(invoke(fragmented, "--json", "--explain")[1])
    assert [diagnosis["class"] for diagnosis in found["diagnoses"]][:1] == ["Fragmentation"]
    largest = found["explanation"]["causes"][0]
    assert (largest["class"], largest["weight"]) == ("Fragmentation", "CERTAIN")
    assert largest["excess_bytes"] == round(2.3 * (1 << 30))
    owners = {entry["owner"]: entry["size_bytes"] for entry in found["explanation"]["gpu"]}
    assert owners["free"] == 0
    assert found["explanation"]["host"] == []


def test_a_job_without_a_failure_gets_a_message(healthy: str) -> None:
    assert invoke(healthy, "--json")[:2] == (0, "[]\n")
    code, output, _ = invoke(healthy)
    assert code == 0
    assert output.startswith("No out-of-memory failure found in")


def test_the_exit_code_reports_a_failure_if_requested(fragmented: str, healthy: str) -> None:
    assert invoke(fragmented)[0] == 0
    assert invoke(fragmented, "--exit-code")[0] == 1
    assert invoke(healthy, "--exit-code")[0] == 0


def test_without_readable_input_the_command_exits_with_2(tmp_path: Path) -> None:
    code, output, error = invoke(str(tmp_path / "missing"))
    assert (code, output) == (2, "")
    assert "No such file" in error
    code, _, error = invoke()
    assert code == 2
    assert "--pod or --job" in error


def test_several_files_are_the_evidence_of_one_failure(tmp_path: Path) -> None:
    growth, log = tmp_path / "memory.log", tmp_path / "train.log"
    growth.write_text("".join(f"step {step} allocated: {20 + 4 * step} GiB\n" for step in range(12)))
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert json.loads(invoke(str(log), "--json")[1])[0]["class"] == "Unknown"
    assert json.loads(invoke(str(growth), str(log), "--json")[1])[0]["class"] == "RetainedGraph"


@pytest.mark.parametrize(
    ("status", "exit_code", "is_named"), [("Failed", 84, True), ("Failed", 80, False), ("Complete", 0, False)]
)
def test_a_run_that_failed_for_another_reason_names_it(
    tmp_path: Path, status: str, exit_code: int, is_named: bool
) -> None:
    reason = "the reward function rewards:slow took more than 30 s [task.rewardTimeoutSeconds]. Logs: runs/slow/logs."
    summary = {"status": status, "exit_code": exit_code, "exit_reason": reason}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    code, output, _ = invoke(str(tmp_path))
    assert code == 0
    assert (f"failed for another reason (exit code {exit_code}): {reason}" in output) is is_named
    assert json.loads(invoke(str(tmp_path), "--json")[1]) == []


@pytest.mark.parametrize("content", ["torn {", "[]", "{}", '"text"'])
def test_an_invalid_summary_changes_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    assert "another reason" not in invoke(str(tmp_path))[1]


def test_only_the_log_of_an_rljob_gets_its_fields(fragmented: str, tmp_path: Path) -> None:
    assert "memory.expandableSegments" not in invoke(str(tmp_path))[1]
    (tmp_path / "ledger.jsonl").write_text('{"kind": "attempt", "attempt": 1}\n')
    assert "memory.expandableSegments" in invoke(str(tmp_path))[1]
