"""Every option that a diagnosis advises was found in its package: the record is compared with the table."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench.harness.record import RESULTS
from bench.programs.program_options import RELEASES, Release, _row
from rljob_memory.programs import PROGRAMS

ROWS: list[dict[str, Any]] = json.loads((RESULTS / "program_options.json").read_text())["rows"]
CHECKED = [row for row in ROWS if row["package"]]


@pytest.mark.parametrize("key", PROGRAMS)
def test_every_program_is_in_the_record(key: str) -> None:
    assert key in {row["program"] for row in ROWS}


def test_the_record_is_of_the_releases() -> None:
    recorded = [(row["program"], row["package"], row["version"]) for row in CHECKED]
    assert recorded == [(release.program, release.package, release.version) for release in RELEASES]


def test_no_option_is_missing() -> None:
    assert [row["missing"] for row in CHECKED] == [[]] * len(CHECKED)


@pytest.mark.parametrize("key", sorted({row["program"] for row in CHECKED}))
def test_every_option_was_found_in_a_version_that_has_it(key: str) -> None:
    """A new option, or a new name, needs a new record: run `python -m bench.programs.program_options`."""
    rows = [row for row in CHECKED if row["program"] == key]
    assert PROGRAMS[key].version in {row["version"] for row in rows}
    for option in PROGRAMS[key].options:
        assert any(option.is_of(row["version"]) and option.name in row["found"] for row in rows), option.name


def test_an_option_that_is_not_defined_is_missing(tmp_path: Path) -> None:
    wheel = tmp_path / "openrlhf-0.9.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("openrlhf/cli.py", 'parser.add_argument("--micro_train_batch_size")  # not --adam_offload\n')
    row = _row(Release("openrlhf", "openrlhf", "0.9.0"), [wheel])
    assert row["found"] == ["--micro_train_batch_size"]
    assert "--adam_offload" in row["missing"]
