"""docs/diagnose.md agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

from rljob_api.memory_settings import MemorySettings
from rljob_memory.diagnosis import FailureClass

PAGE = Path(__file__).parents[4] / "docs" / "diagnose.md"


def test_the_table_of_classes_is_the_enumeration() -> None:
    documented = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| `[A-Z]\w+` \|", line)]
    assert documented == [f"| `{cause}` | {cause.meaning} | {cause.advice} |" for cause in FailureClass]


def test_the_advice_names_existing_settings() -> None:
    named = {name for cause in FailureClass for name in re.findall(r"\bmemory\.(\w+)", cause.advice)}
    settings = {field.alias for field in MemorySettings.model_fields.values()} | {
        name for name in MemorySettings.model_fields
    }
    assert named - {"_dump_snapshot"} <= settings
