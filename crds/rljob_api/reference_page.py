"""The manifest reference of the docs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rljob_api.inlined_schema import Schema, inlined_schema
from rljob_api.job import RLJobSpec

_INTRODUCTION = """# Manifest reference

This page is generated from the API types by `make generate`; do not edit it.

`rljob validate FILE` [checks a manifest](run.md#check-a-manifest). Editors with a YAML language server check it as you
type, with [`rljob.schema.json`](../crds/schema/rljob.schema.json): write
`# yaml-language-server: $schema=<path>/rljob.schema.json` on the first line.

Only `model`, `task` and `algorithm.steps` are required. All other fields have defaults.
"""


def reference_page() -> str:
    """Markdown page with a table for `spec` and one for each object in it."""
    return "\n".join([_INTRODUCTION, *_tables("spec", inlined_schema(RLJobSpec))])


def _tables(path: str, schema: Schema) -> Iterator[str]:
    required = set(schema.get("required", []))
    yield f"## {path}\n\n{schema.get('description', '')}\n"
    yield "| field | type | default | description |\n|---|---|---|---|"
    objects = []
    for name, field in schema["properties"].items():
        default = "*required*" if name in required else _default(field)
        yield f"| `{name}` | {_type(field)} | {default} | {_cell(field.get('description', ''))} |"
        if field.get("properties"):
            objects.append((f"{path}.{name}", field))
        elif field.get("items", {}).get("properties"):
            objects.append((f"{path}.{name}[]", field["items"]))
    yield ""
    for inner_path, inner in objects:
        yield from _tables(inner_path, inner)


def _default(field: Schema) -> str:
    default = field.get("default")
    return "" if default is None or default == {} else f"`{json.dumps(default)}`".replace('"', "")


def _type(field: Schema) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return _cell(", ".join(f"`{value}`" for value in field["enum"]))
    if "anyOf" in field:
        return _any_of(field["anyOf"])
    return f"{field.get('type', 'any')}{_bounds(field)}"


def _any_of(alternatives: list[dict[str, Any]]) -> str:
    patterns = [alternative.get("pattern", "") for alternative in alternatives]
    words = ["`Auto`"] if any("Auto" in pattern for pattern in patterns) else []
    words.append("quantity" if any("Ki" in pattern for pattern in patterns) else "integer")
    return " or ".join(words)


def _bounds(field: Schema) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    above, below = field.get("exclusiveMinimum"), field.get("exclusiveMaximum")
    parts = [
        f"≥ {low}" if low is not None else f"> {above}" if above is not None else "",
        f"≤ {high}" if high is not None and high < 10_000_000 else f"< {below}" if below is not None else "",
    ]
    shown = ", ".join(part for part in parts if part)
    return f" {shown}" if shown else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
