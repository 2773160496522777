"""Paths of this checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "rljob-operator"
EXAMPLES = ROOT / "examples"
