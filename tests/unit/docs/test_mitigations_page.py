"""docs/mitigations.md describes every memory setting."""

from __future__ import annotations

import re
from pathlib import Path

from rljob_api.memory_settings import MemorySettings

PAGE = (Path(__file__).parents[3] / "docs" / "mitigations.md").read_text()


def test_each_memory_setting_has_a_section_with_use_cost_and_pin() -> None:
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
    settings = {field.alias for field in MemorySettings.model_fields.values()} - {"mode"}
    assert settings <= sections.keys()
    for name in settings:
        assert "\n- When: " in sections[name], name
        assert "\n- Costs: " in sections[name], name
        assert f"\n- Pin it: `{name}: " in sections[name], name
