"""Generates files of the chart and the docs: copies of CRDs and examples, the operator's settings, what values mean.

python charts/generate.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from rljob_api.generate import REPOSITORY, write
from rljob_operator.options import OperatorOption, options
from rljob_operator.settings import Group, OperatorSettings

CHART = REPOSITORY / "charts" / "rljob-operator"
MANIFESTS = REPOSITORY / "crds" / "manifests"
EXAMPLES = ("digits", "digits-cpu")
"""Jobs that the chart's notes show."""

Schema = dict[str, Any]

_REPEATED = {"description", "enum", "minimum", "maximum"}
"""Keys of a value's schema that are copied from the operator's setting."""

_GENERATED_COMMENT = re.compile(r" *#(?: -- |    )")
"""A line of `values.yaml` that is written anew each time."""

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
    examples = {f"charts/rljob-operator/files/examples/{name}.yaml": example(name) for name in EXAMPLES}
    schema = values_schema()
    return (
        crds
        | examples
        | {
            "charts/rljob-operator/values.schema.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n",
            "charts/rljob-operator/values.yaml": "".join(commented_values(schema)),
            "docs/chart-values.md": values_page(schema),
            "docs/operator.md": operator_page(),
        }
    )


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


def example(name: str) -> str:
    """An example without its comments, which refer to other files of the repository."""
    lines = (REPOSITORY / "examples" / f"{name}.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("#"))


def commented_values(schema: Schema) -> Iterator[str]:
    """Lines of `values.yaml`, with each value's description above it, in the form that helm-docs reads."""
    within: list[Schema] = [schema]
    for line in (CHART / "values.yaml").read_text(encoding="utf-8").splitlines(keepends=True):
        key = re.match(r"( *)(\w+):", line)
        level = len(key[1]) // 2 if key else 0
        if _GENERATED_COMMENT.match(line):
            continue
        if key and level < len(within):
            value = _resolved(within[level]["properties"][key[2]], schema["definitions"])
            within[level + 1 :] = [value] if "properties" in value else []
            yield _comment(value["description"] + _choices(value), key[1])
        yield line


def _comment(text: str, indent: str) -> str:
    first, later = f"{indent}# -- ", f"{indent}#    "
    lines = textwrap.wrap(
        text, 110, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return "".join(f"{line}\n" for line in lines)


def operator_page() -> str:
    """The manual of the operator, with the table of its options between its marks."""
    page = (REPOSITORY / "docs" / "operator.md").read_text(encoding="utf-8")
    before, begin, rest = page.partition("<!-- from operator/rljob_operator/settings.py -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    return f"{before}{begin}{_options_table()}{end}{after}"


def _options_table() -> str:
    """Markdown table of all options, by group."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for group in Group:
        lines.append(f"| **{group}** | | |")
        for option in options():
            if option.group is group:
                default = "required" if option.required else f"`{option.default}`" if option.default else ""
                lines.append(f"| `{option.flag}` | {default} | {option.description}{_hint(option)} |")
    return "\n".join(lines) + "\n"


def _hint(option: OperatorOption) -> str:
    values = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
    repeatable = f" Takes `{option.metavar}`." if option.metavar == "NAME=VALUE" else ""
    return values + repeatable + (" Repeatable." if option.is_repeatable else "")


def values_page(schema: Schema) -> str:
    """Markdown: one row for each value that can be set by itself."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    rows = "\n".join(_rows(schema, schema["definitions"], defaults, ""))
    return f"{_INTRODUCTION}\n| value | default | meaning |\n|---|---|---|\n{rows}\n"


def _rows(schema: Schema, definitions: dict[str, Schema], defaults: dict[str, Any], path: str) -> Iterator[str]:
    for name, declared in schema["properties"].items():
        if name not in defaults:
            continue  # `global` belongs to a parent chart
        value = _resolved(declared, definitions)
        meaning = value["description"] + _choices(value)
        if "properties" in value:
            yield f"| **`{path}{name}`** | | {meaning} |"
            yield from _rows(value, definitions, defaults[name], f"{path}{name}.")
        else:
            yield f"| `{path}{name}` | {_shown(defaults[name])} | {meaning} |"


def _resolved(declared: Schema, definitions: dict[str, Schema]) -> Schema:
    return definitions[declared["$ref"].rpartition("/")[2]] | declared if "$ref" in declared else declared


def _choices(value: Schema) -> str:
    return f" One of {', '.join(f'`{choice}`' for choice in value['enum'] if choice)}." if "enum" in value else ""


def _shown(default: Any) -> str:
    text = default if isinstance(default, str) else json.dumps(default)
    return f"`{text}`" if text else "empty"


if __name__ == "__main__":
    sys.exit(write(generated_files, __doc__))
