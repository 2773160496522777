"""Sizes of memory are constants of the budget alone."""

from __future__ import annotations

import re
from pathlib import Path

import rljob_memory
from rljob_testing.repository import ROOT

_SIZE = re.compile(
    r"^_?[A-Z][A-Z0-9_]*(?:BYTES|_[KMG]IB)[A-Z0-9_]*\b.*= *(?!\()(?=.*(?:\b[GMK]IB\b|<<|\d)).*", re.MULTILINE
)
_SOURCES = {"budget", "hardware.py"}
"""Modules that may define sizes: the budget and the table of GPUs."""
_OTHER_MEANINGS = {
    "plan.py": "bounds of a search",
    "pod_memory.py": "steps of requests",
    "sizes.py": "units, and the largest size that is read",
    "forecast.py": "the least growth that is reported",
    "trend.py": "the least growth that is reported",
    "workload.py": "bytes of a number",
    "evidence": "units, and limits of what is read",
    "diagnosis/causes": "thresholds of observed memory",
}
"""Modules with constants that predict no memory."""
_LARGE = re.compile(r"\b[GT]IB\b|_GIB|<< ?30|2\*\*30")
_ELSEWHERE = {
    "_LARGEST_BYTES": "the largest size that a person may write",
    "LIMIT_BYTES": "of the cache of compiled code",
    "_LOGICAL_MEMORY_BYTES": "a resource of Ray that nobody requests",
}
"""Large constants of other parts that predict no memory."""


def test_predicted_sizes_are_constants_of_the_budget_alone() -> None:
    package = Path(rljob_memory.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if _SIZE.search(path.read_text("utf-8"))}
    assert any(name.startswith("budget/") for name in found), "the pattern finds them"
    assert [name for name in sorted(found) if not name.startswith((*_SOURCES, *_OTHER_MEANINGS))] == []


def test_other_parts_predict_no_memory_of_models() -> None:
    parts = ("client/rljob_client", "operator/rljob_operator/objects", "operator/rljob_operator/reconcile")
    for part in (*parts, "trainer/rljob_trainer/pods", "trainer/rljob_trainer/recovery"):
        for path in (ROOT / part).rglob("*.py"):
            large = [line for line in _SIZE.findall(path.read_text("utf-8")) if _LARGE.search(line)]
            assert {line.split()[0].rstrip(":") for line in large} <= _ELSEWHERE.keys(), path
