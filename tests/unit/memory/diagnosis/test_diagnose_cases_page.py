"""docs/diagnose-cases.md agrees with the recorded failures and with the output of `rljob diagnose`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rljob_trainer.diagnose_command import run_diagnose
from tests.unit.memory.diagnosis.recorded import RECORDED, source_line

PAGE = Path(__file__).parents[4] / "docs" / "diagnose-cases.md"
CASE = re.compile(
    r"^## .+?\n\n`(?P<name>[^`]+)`, (?P<origin>.+?):\n\n```\n(?P<excerpt>.+?)```\n\n"
    r"```console\n\$ rljob diagnose (?P<argument>\S+)\n(?P<output>.+?)```\n\n\S",
    re.MULTILINE | re.DOTALL,
)
CASES = list(CASE.finditer(PAGE.read_text(encoding="utf-8")))
_COLUMNS = "118"


def compact(text: str) -> str:
    return "".join(text.split())


def recorded_text(path: Path) -> str:
    files = sorted(path.rglob("*.log")) if path.is_dir() else [path]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_the_page_has_ten_cases_of_different_classes() -> None:
    assert len({case["name"].partition("/")[0] for case in CASES}) == 10


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_case_shows_its_recorded_input_and_source(case: re.Match[str]) -> None:
    path = RECORDED / case["name"]
    text = compact(recorded_text(path))
    for line in re.split(r"\n(?! {2})", case["excerpt"].strip()):
        assert compact(line.removesuffix("…")) in text
    url = re.search(r"<(.+?)>", case["origin"])
    assert url is None or url[1] in source_line(path)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_case_shows_the_output_as_printed(
    case: re.Match[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert case["argument"] == case["name"]
    monkeypatch.setenv("COLUMNS", _COLUMNS)
    assert run_diagnose([RECORDED / case["name"]], as_json=False) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed.startswith(case["output"])
