"""Tables in the docs agree with the code."""

from __future__ import annotations

from pathlib import Path

from rljob_api.exit_codes import ExitCode

DOCS = Path(__file__).parents[3] / "docs"


def test_the_table_of_exit_codes_is_the_enumeration() -> None:
    section = (DOCS / "run.md").read_text().partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    documented = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert documented == [
        f"| {code.value} | `{code.name}` | {code.meaning} | {'yes' if code.retry else 'no'} |" for code in ExitCode
    ]
