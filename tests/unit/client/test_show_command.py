from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rljob_client.app import app
from rljob_client.run_directory.samples import Sample

WIDTH = 80


def write(directory: Path, *samples: dict[str, Any]) -> None:
    values = {
        "kind": "train",
        "prompt_index": 3,
        "prompt": "4 + 3 =",
        "response": "7",
        "reward": 1.0,
        "advantage": 0.5,
        "finished": True,
        "tokens": 2,
    }
    lines = [Sample.model_validate(values | sample).model_dump_json() + "\n" for sample in samples]
    (directory / "samples.jsonl").write_text("".join(lines))


def show(*arguments: object) -> tuple[int, str, str]:
    import rljob_client.cli  # noqa: F401  adds the commands

    done = CliRunner(env={"COLUMNS": str(WIDTH), "NO_COLOR": "1"}).invoke(app, ["show", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_the_last_step_is_shown_within_the_terminal(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"step": 1, "response": "one"},
        {
            "step": 2,
            "prompt": "Add: " + "4 + " * 40,
            "response": "wide 数字 " * 20 + "\nlast",
            "rewards": {"format": 0.5, "judge": None},
            "finished": False,
        },
        {"step": 2, "kind": "evaluation", "advantage": None, "response": ""},
    )
    code, printed, _ = show(tmp_path)
    lines = printed.splitlines()
    assert code == 0
    assert " ".join(lines[:2]).startswith(
        "sample of step 2  prompt 3  reward 1.000 (format 0.5, judge –)  advantage +0.50  2 tokens, cut"
    )
    assert all(len(line) <= WIDTH for line in lines)
    assert "last" in printed
    assert "one" not in printed
    assert "evaluation sample of step 2  prompt 3  reward 1.000  2 tokens" in lines
    assert lines[-1].split() == ["response", "(empty)"]


def test_a_response_cannot_control_the_terminal(tmp_path: Path) -> None:
    write(tmp_path, {"step": 1, "response": "\x1b[31mred\x07 [bold]:smile:[/]\x9b2J"})
    _, printed, _ = show(tmp_path)
    assert r"\x1b[31mred\x07 [bold]:smile:[/]\x9b2J" in printed


def test_a_step_and_a_kind_can_be_chosen_as_json(tmp_path: Path) -> None:
    write(tmp_path, {"step": 1}, {"step": 2}, {"step": 2, "kind": "evaluation", "advantage": None})
    assert [found["step"] for found in json.loads(show(tmp_path, "--step", 1, "--json")[1])] == [1]
    assert [found["kind"] for found in json.loads(show(tmp_path, "--kind", "evaluation", "--json")[1])] == [
        "evaluation"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "7"], "expected samples of step 7"),
        (["--step", "7"], "found those of 1 to 2; give one of these as --step"),
        (["--kind", "evaluation"], "expected evaluation samples in"),
    ],
)
def test_samples_that_are_not_there_are_explained(tmp_path: Path, arguments: list[str], message: str) -> None:
    write(tmp_path, {"step": 1}, {"step": 2})
    code, _, error = show(tmp_path, *arguments)
    assert code == 1
    assert message in error


def test_a_directory_without_samples_is_explained(tmp_path: Path) -> None:
    code, _, error = show(tmp_path / "absent")
    assert code == 1
    assert "samples.jsonl, found none; give the output directory of a run that keeps samples" in error
