"""Markdown that several reports share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.harness.record import RESULTS

GIB, MIB = 2**30, 2**20

Result = Mapping[str, Any]
Row = Mapping[str, Any]


def read(name: str) -> Result:
    """The recorded result bench/results/<name>.json."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def has_result(name: str) -> bool:
    """True if bench/results/<name>.json is recorded."""
    return (RESULTS / f"{name}.json").exists()


def source(result: Result, *, versions: bool = True) -> str:
    """One line: the script, date, device and versions of a result."""
    script = result["script"]
    command = f"python -m {script.removesuffix('.py').replace('/', '.')}" if script.endswith(".py") else script
    shown = [(name, result["versions"].get(name)) for name in ("torch", "vllm", "ray", "transformers")]
    packages = [f"{name} {version}" for name, version in shown if version and versions]
    return f"`{command}`, {', '.join([result['date'], result['device'], *packages])}.\n"


def sentence(note: str) -> str:
    """A note as a sentence: with a capital, or with its first word as code if that is the name of a file."""
    first, space, rest = note.partition(" ")
    if ".yaml" in first:
        name = first.rstrip(",")
        return f"`{name}`{first[len(name) :]}{space}{rest}."
    return f"{note[0].upper()}{note[1:]}."


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return f"{_line(header)}|{'---|' * len(header)}\n{''.join(map(_line, rows))}"


def _line(cells: Sequence[object]) -> str:
    return "|" + "".join(f" {cell} |" if cell != "" else " |" for cell in cells) + "\n"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values, without a header."""
    return table(("", ""), rows)


def gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def parts(seconds: Mapping[str, float]) -> str:
    """Seconds by part, in one cell; parts under 0.05 s are left out."""
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05) or "–"
