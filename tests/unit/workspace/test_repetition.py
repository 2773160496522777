"""The repetition of failed tests, on which the result of a run depends."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_testing.repository import ROOT
from tests.results import MOST_REPEATED, read_results

FLAKY = """
from pathlib import Path
def test_flaky():
    tried = Path(__file__).with_suffix(".tried")
    seen = tried.exists()
    tried.touch()
    assert seen, "the first attempt fails"
"""
FAILING = "def test_failing(): assert False\n"
PASSING = "def test_passing(): pass\n"
BROKEN_FIXTURE = """
import pytest
@pytest.fixture
def broken(): raise RuntimeError("no cluster")
def test_broken(broken): pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A repository with the settings of these tests and none of them."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "results.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers = long: slow\n")
    return tmp_path


def run(suite: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    """The exit code and the output of a run of the files."""
    for name, text in files.items():
        path = suite / "tests" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    command = [sys.executable, "-m", "pytest", "--results=results/commit.json", *options]
    done = subprocess.run(command, cwd=suite, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


INTEGRATION, E2E, UNIT = (f"{folder}/test_{folder}.py" for folder in ("integration", "e2e", "unit"))


@pytest.mark.parametrize(
    ("files", "options", "exit_code", "counts", "flaky", "failed"),
    [
        ({UNIT: PASSING}, (), 0, "1 passed", [], []),
        (
            {UNIT: PASSING, INTEGRATION: FLAKY, E2E: FLAKY},
            ("--numprocesses=2",),
            0,
            "1 passed, 2 flaky",
            [f"{E2E}::test_flaky", f"{INTEGRATION}::test_flaky"],
            [],
        ),
        (
            {UNIT: FLAKY, INTEGRATION: FLAKY, E2E: FAILING + BROKEN_FIXTURE},
            (),
            1,
            "2 failed, 1 error, 1 flaky",
            [f"{INTEGRATION}::test_flaky"],
            [f"{E2E}::test_failing", f"{UNIT}::test_flaky", f"{E2E}::test_broken"],
        ),
    ],
    ids=["passing", "flaky", "failing"],
)
def test_only_a_repeated_pass_outside_unit_tests_forgives_a_failure(
    suite: Path,
    files: dict[str, str],
    options: tuple[str, ...],
    exit_code: int,
    counts: str,
    flaky: list[str],
    failed: list[str],
) -> None:
    found, printed = run(suite, files, "--long", "--repeat", *options)
    assert found == exit_code, printed
    assert re.fullmatch(rf"=+ {counts} in .*s =+", printed.splitlines()[-1]), printed
    results = read_results(suite / "results" / "commit.json")
    assert sorted(results["flaky"]) == [f"tests/{test}" for test in flaky]
    assert results["failed"] == [f"tests/{test}" for test in failed]
    assert results["seconds"].keys() >= {*results["flaky"], *results["failed"]}
    for test in flaky:
        assert f"flaky: tests/{test}\n" in printed
        assert "the first attempt fails" in results["flaky"][f"tests/{test}"]


def test_many_failures_are_not_repeated(suite: Path) -> None:
    many = FLAKY.replace(
        "def test_flaky():", "import pytest\n@pytest.mark.parametrize('n', range(11))\ndef test_flaky(n):"
    )
    many = many.replace('".tried"', 'f".{n}"')
    assert MOST_REPEATED < 11
    exit_code, printed = run(suite, {INTEGRATION: many}, "--repeat")
    assert exit_code == 1
    assert "11 failed" in printed.splitlines()[-1]
