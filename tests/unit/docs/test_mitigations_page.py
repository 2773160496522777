"""docs/mitigations.md has a section for every memory setting."""

from __future__ import annotations

import re
from pathlib import Path

from rljob_api.memory_settings import MemorySettings

PAGE = (Path(__file__).parents[3] / "docs" / "mitigations.md").read_text()


def test_each_memory_setting_has_a_section() -> None:
    settings = {field.alias for field in MemorySettings.model_fields.values()} - {"mode"}
    assert settings <= set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE))
