"""docs/other-trainers.md agrees with the code about variables and settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from rljob_api.memory_plan import MemoryPlan
from rljob_api.roles import SupportedSetting
from rljob_operator.objects.pod_environment import plan_variables
from tests.unit.operator.objects.builders import PLAN

PAGE = (Path(__file__).parents[3] / "docs" / "other-trainers.md").read_text()


def test_the_page_names_the_variable_of_every_supported_setting() -> None:
    documented = dict(re.findall(r"^\| `(\w+)` \| `(RLJOB_PLAN_\w+)` \|", PAGE, re.MULTILINE))
    by_the_allocator = "expandableSegments"
    assert set(documented) == set(get_args(SupportedSetting)) - {by_the_allocator}
    for setting, variable in documented.items():
        assert list(plan_variables(PLAN, [setting])) == [variable]


def test_every_supported_setting_is_one_of_the_plan() -> None:
    assert set(get_args(SupportedSetting)) <= {field.alias for field in MemoryPlan.model_fields.values()}
