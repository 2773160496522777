"""Sizes of memory are constants of the budget alone."""

from __future__ import annotations

import re
from pathlib import Path

import rljob_memory
from rljob_testing.repository import ROOT

_SIZE = re.compile(r"^_?[A-Z][A-Z0-9_]*BYTES[A-Z0-9_]*\b.*=.*(?:\b[GMK]IB\b|<<|\d{6,})", re.MULTILINE)
_SOURCES = {"budget", "hardware.py"}
"""Modules that may define sizes: the budget and the table of GPUs."""
_OTHER_MEANINGS = {
    "plan.py": "bounds of a search",
    "next_plan.py": "sizes of another trainer, which only count relative to each other",
    "pod_memory.py": "steps of requests",
    "sizes.py": "the largest size that is read",
    "forecast.py": "the least growth that is reported",
    "trend.py": "the least growth that is reported",
    "recovery": "steps of changes",
    "evidence": "units, and limits of what is read",
    "diagnosis": "thresholds of observed memory",
}
"""Modules with constants that predict no memory."""


def test_predicted_sizes_are_constants_of_the_budget_alone() -> None:
    package = Path(rljob_memory.__file__).parent
    found = {path.relative_to(package).parts[0] for path in package.rglob("*.py") if _SIZE.search(path.read_text())}
    assert found >= _SOURCES - {"hardware.py"}, "the pattern finds them"
    assert found <= _SOURCES | _OTHER_MEANINGS.keys()


def test_other_parts_predict_no_memory_of_models() -> None:
    for part in ("client/rljob_client", "operator/rljob_operator/objects", "operator/rljob_operator/reconcile"):
        for path in (ROOT / part).rglob("*.py"):
            large = [line for line in _SIZE.findall(path.read_text()) if re.search(r"GIB|<< ?30", line)]
            assert not large, f"{path}: {large}"
