"""Puts images/ on the path: its build script is a program of the repository, not an installed part."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "images"))
