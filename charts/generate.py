"""Generates files of the chart and the docs: copies of the CRDs, the operator's settings, the reference of the values.

python charts/generate.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rljob_operator.options import options, options_table
from rljob_operator.settings import OperatorSettings

REPOSITORY = Path(__file__).resolve().parents[1]
CHART = REPOSITORY / "charts" / "rljob-operator"
MANIFESTS = REPOSITORY / "crds" / "manifests"

Schema = dict[str, Any]

_REPEATED = {"description", "enum", "minimum", "maximum"}
"""Keys of a value's schema that are copied from the operator's setting."""

_INTRODUCTION = """# Chart values

This page is generated from the chart's `values.schema.json` and `values.yaml` by `make generate`; do not edit it. Helm
validates your values against the schema and rejects a value that does not exist.
"""


def generated_files() -> dict[str, str]:
    """Text of every generated file, by its path in the repository."""
    crds = {
        f"charts/rljob-operator/files/crds/{path.name}": path.read_text(encoding="utf-8")
        for path in MANIFESTS.glob("*.yaml")
    }
    schema = values_schema()
    return crds | {
        "charts/rljob-operator/values.schema.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n",
        "docs/chart-values.md": values_page(schema),
        "docs/operator.md": operator_page(),
    }


def values_schema() -> Schema:
    """The schema of the values; a value that is passed on to a setting has the setting's description and bounds."""
    schema: Schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    declared = OperatorSettings.model_json_schema()["properties"]
    for option in options():
        declared[option.name]["description"] = option.description
    for setting, path in _passed_on().items():
        value = schema
        for name in path.split("."):
            value = value.get("properties", {}).get(name, {})
        value |= {key: declared[setting][key] for key in _REPEATED & declared[setting].keys() if "description" in value}
    return schema


def _passed_on() -> dict[str, str]:
    """Path of the value, by the setting that the chart's template takes from it alone."""
    template = (CHART / "templates" / "_operator-env.tpl").read_text(encoding="utf-8")
    found = re.findall(
        r'^  "([A-Z_]+)" \(?(?:int64 |join " " )?(\.Values|\$jobs)\.([\w.]+)\)?$', template, re.MULTILINE
    )
    return {setting.lower(): f"jobs.{path}" if root == "$jobs" else path for setting, root, path in found}


def operator_page() -> str:
    """The manual of the operator, with the table of its options between its marks."""
    page = (REPOSITORY / "docs" / "operator.md").read_text(encoding="utf-8")
    before, begin, rest = page.partition("<!-- from operator/rljob_operator/settings.py -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    return f"{before}{begin}{options_table()}{end}{after}"


def values_page(schema: Schema) -> str:
    """Markdown: one row for each value that can be set by itself."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    rows = "\n".join(_rows(schema, schema["definitions"], defaults, ""))
    return f"{_INTRODUCTION}\n| value | default | meaning |\n|---|---|---|\n{rows}\n"


def _rows(schema: Schema, definitions: dict[str, Schema], defaults: dict[str, Any], path: str) -> Iterator[str]:
    for name, declared in schema["properties"].items():
        if name not in defaults:
            continue  # `global` belongs to a parent chart
        value = definitions[declared["$ref"].rpartition("/")[2]] | declared if "$ref" in declared else declared
        meaning = value["description"] + _choices(value)
        if "properties" in value:
            yield f"| **`{path}{name}`** | | {meaning} |"
            yield from _rows(value, definitions, defaults[name], f"{path}{name}.")
        else:
            yield f"| `{path}{name}` | {_shown(defaults[name])} | {meaning} |"


def _choices(value: Schema) -> str:
    return f" One of {', '.join(f'`{choice}`' for choice in value['enum'] if choice)}." if "enum" in value else ""


def _shown(default: Any) -> str:
    text = default if isinstance(default, str) else json.dumps(default)
    return f"`{text}`" if text else "empty"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is not up to date")
    check = parser.parse_args().check
    files = {REPOSITORY / name: text for name, text in generated_files().items()}
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(REPOSITORY)} is not up to date: run charts/generate.py", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
            print(path.relative_to(REPOSITORY))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
